// The code interpreter by its client for TypeScript. Every step throws when it is not as promised.
import assert from 'node:assert/strict'
import { NotFoundError, Sandbox, TimeoutError } from '@e2b/code-interpreter'

const long = { timeoutMs: 120_000 }
const sandbox = await Sandbox.create({ timeoutMs: 600_000, envs: { COLOUR: 'blue' } })
assert.equal((await sandbox.runCode('1+1', long)).text, '2')
const seen = []
const done = await sandbox.runCode("x = 20\nprint('Hello from e2b')\nx + 1", {
  ...long,
  onStdout: (message) => seen.push(message.line),
  onResult: (result) => seen.push(result.text),
})
assert.deepEqual([done.text, done.logs.stdout, done.executionCount], ['21', ['Hello from e2b\n'], 2])
assert.deepEqual(seen, ['Hello from e2b\n', '21'])
assert.equal((await sandbox.runCode("import os; os.environ['COLOUR']", { ...long, envs: { COLOUR: 'red' } })).text, 'red')
const failed = (await sandbox.runCode('not_there', long)).error
assert.deepEqual([failed.name, failed.value], ['NameError', "name 'not_there' is not defined"])
assert.deepEqual((await sandbox.runCode("display({'a': [1]})", long)).results[0].json, { a: [1] })

assert.equal((await sandbox.runCode('const y = 6; y * 7', { ...long, language: 'js' })).text, '42')
const context = await sandbox.createCodeContext({ cwd: '/root', language: 'javascript' })
assert.ok((await sandbox.listCodeContexts()).some((one) => one.id === context.id))
assert.equal((await sandbox.runCode('globalThis.kept = process.cwd()', { ...long, context })).text, '/root')
await sandbox.restartCodeContext(context)
assert.equal((await sandbox.runCode('typeof kept', { ...long, context })).text, 'undefined')
await sandbox.removeCodeContext(context)
await assert.rejects(sandbox.runCode('1', { ...long, context }), NotFoundError)

await assert.rejects(sandbox.runCode('import time; time.sleep(300)', { timeoutMs: 2000 }), TimeoutError)
assert.equal((await sandbox.runCode('x', long)).text, '20')
assert.equal(await sandbox.kill(), true)
console.log('all is well')
