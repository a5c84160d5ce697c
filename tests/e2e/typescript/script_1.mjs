// The first generation of the TypeScript SDK, 1.x: no routing headers, hosts below one domain, TLS.
// Prints the name of each call once it has given what it should.
import assert from 'node:assert/strict'
import dns from 'node:dns'

// Every host name of the test's domain is this machine.
const real = dns.lookup
dns.lookup = (host, ...rest) => real(host.endsWith('.test') ? '127.0.0.1' : host, ...rest)

const { Sandbox, CommandExitError, NotFoundError } = await import('e2b-1')
const cameTo = (...calls) => calls.forEach((call) => console.log(call))

const sandbox = await Sandbox.create('base', { timeoutMs: 3600_000, metadata: { by: 'typescript-1' }, envs: { COLOUR: 'blue' } })
cameTo('Sandbox.create')
try {
  assert.ok(await sandbox.isRunning())
  assert.equal((await sandbox.commands.run('echo $COLOUR; pwd; id -un')).stdout, 'blue\n/home/user\nuser\n')
  await assert.rejects(sandbox.commands.run('exit 7', { user: 'root', cwd: '/tmp' }), (error) => error instanceof CommandExitError && error.exitCode === 7)
  cameTo('commands.run')
  const cat = await sandbox.commands.run('cat', { background: true })
  assert.ok((await sandbox.commands.list()).some((process) => process.pid === cat.pid))
  await sandbox.commands.sendStdin(cat.pid, 'typed\n')
  assert.equal(await cat.kill(), true)
  cameTo('commands.list', 'commands.sendStdin', 'commands.kill')

  await sandbox.files.write('notes/a.txt', 'hi')
  assert.equal(await sandbox.files.read('notes/a.txt'), 'hi')
  assert.ok((await sandbox.files.list('/home/user')).some((entry) => entry.name === 'notes'))
  assert.equal(await sandbox.files.makeDir('deep/er'), true)
  assert.equal((await sandbox.files.rename('notes/a.txt', 'deep/b.txt')).path, '/home/user/deep/b.txt')
  await sandbox.files.remove('deep')
  assert.equal(await sandbox.files.exists('deep'), false)
  await assert.rejects(sandbox.files.read('deep'), NotFoundError)
  cameTo('files.write', 'files.read', 'files.list', 'files.makeDir', 'files.rename', 'files.remove', 'files.exists')

  let seen = ''
  const terminal = await sandbox.pty.create({ cols: 80, rows: 24, onData: (data) => { seen += new TextDecoder().decode(data) } })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('echo cols=$(tput cols); exit\n'))
  await terminal.wait()
  assert.match(seen, /cols=80/)
  cameTo('pty.create', 'pty.sendInput')

  const info = await sandbox.getInfo()
  assert.deepEqual(info.metadata, { by: 'typescript-1' })
  await sandbox.setTimeout(7200_000)
  assert.ok((await sandbox.getInfo()).endAt > info.endAt)
  assert.ok((await Sandbox.list()).some((entry) => entry.sandboxId === sandbox.sandboxId))
  await (await Sandbox.connect(sandbox.sandboxId)).files.write('again', 'yes')
  cameTo('Sandbox.getInfo', 'Sandbox.setTimeout', 'Sandbox.list', 'Sandbox.connect')
} finally {
  await sandbox.kill()
}
assert.equal(await sandbox.isRunning(), false)
cameTo('Sandbox.isRunning', 'Sandbox.kill')
