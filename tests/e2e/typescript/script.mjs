// The script of README.md in TypeScript's SDK. Every step throws when it is not as promised.
import assert from 'node:assert/strict'
// The package to try: the current one, or another by name.
const { Sandbox } = await import(process.argv[2] ?? 'e2b')

let sandbox = await Sandbox.create('base', { timeoutMs: 300_000 })
assert.equal((await sandbox.commands.run("python3 -c 'print(6*7)'")).stdout, '42\n')
await sandbox.files.write('/home/user/a.txt', 'hi')
assert.ok((await sandbox.files.list('/home/user')).some((entry) => entry.name === 'a.txt'))
const sleeper = await sandbox.commands.run('sleep 3600', { background: true, timeoutMs: 0 })

await sandbox.pause()
assert.equal(await sandbox.isRunning(), false)
sandbox = await Sandbox.connect(sandbox.sandboxId)
assert.equal(await sandbox.files.read('/home/user/a.txt'), 'hi')
assert.ok((await sandbox.commands.list()).some((process) => process.pid === sleeper.pid))

const children = await sandbox.fork({ count: 4 })
assert.equal(new Set(children.map((child) => child.sandboxId)).size, 4)
for (const child of children) {
  assert.equal(await child.files.read('/home/user/a.txt'), 'hi')
  await child.files.write('/home/user/a.txt', child.sandboxId)
}
assert.equal(await sandbox.files.read('/home/user/a.txt'), 'hi')

const snapshot = await sandbox.createSnapshot({ name: 'prepared-ts' })
const copy = await Sandbox.create(snapshot.snapshotId)
assert.equal(await copy.files.read('/home/user/a.txt'), 'hi')

for (const one of [sandbox, copy, ...children]) assert.equal(await one.kill(), true)
assert.equal(await Sandbox.kill('nonexistingsandbox'), false)
console.log('all is well')
