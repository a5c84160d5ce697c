// A JavaScript and TypeScript context. The main thread is the user's; a worker can stop it when it runs in circles.
//
// Descriptor 3 (a socket) brings commands, one JSON object a line: {"run", "typescript"}, {"env"}, {"interrupt"}.
// Descriptor 4 (a pipe) takes events in the same form: those of the code interpreter's own stream, and {"type": "done"}
// at the end of each run. The main thread alone writes to it, and synchronously: what comes first stands first, and a reader
// that is slow slows the code down.
const { Worker, isMainThread, parentPort, workerData } = require('node:worker_threads')
const inspector = require('node:inspector')

if (isMainThread) main()
else watch()

// Reads commands and passes them on. An interrupt that the main thread does not take, because it runs in circles, terminates
// what it runs.
function watch() {
  const PATIENCE = 200
  const taken = new Int32Array(workerData)
  const session = new inspector.Session()
  session.connectToMainThread()
  const commands = new (require('node:net').Socket)({ fd: 3, readable: true, writable: true })
  require('node:readline').createInterface({ input: commands }).on('line', (line) => {
    const command = JSON.parse(line)
    const before = Atomics.load(taken, 0)
    parentPort.postMessage(command)
    if (!command.interrupt) return
    setTimeout(() => Atomics.load(taken, 0) === before && session.post('Runtime.terminateExecution'), PATIENCE)
  })
  // The service is gone, and so is everybody who could ask for anything.
  commands.on('close', () => {
    session.post('Runtime.terminateExecution')
    process.exit()
  })
}

function main() {
  const fs = require('node:fs')
  const util = require('node:util')
  const vm = require('node:vm')
  const { createRequire, stripTypeScriptTypes } = require('node:module')
  const { StringDecoder } = require('node:string_decoder')

  const session = new inspector.Session()
  session.connect()
  let abandon = null // Ends the run that is waiting for a promise.

  function emit(event) {
    const data = Buffer.from(JSON.stringify(event) + '\n')
    for (let sent = 0; sent < data.length; ) sent += fs.writeSync(4, data, sent)
  }

  function capture(name) {
    const decoder = new StringDecoder('utf8')
    process[name].write = (chunk, encoding, done) => {
      const text = typeof chunk === 'string' ? chunk : decoder.write(Buffer.from(chunk))
      if (text) emit({ type: name, text, timestamp: new Date().toISOString() })
      const called = typeof encoding === 'function' ? encoding : done
      if (called) process.nextTick(called)
      return true
    }
  }

  const post = (method, params) =>
    new Promise((resolve, reject) => {
      session.post(method, params, (error, answer) => (error ? reject(error) : resolve(answer)))
    })

  // What the inspector calls a remote object is a value of this very thread.
  const KEEP = Symbol('kept')
  let kept
  Object.defineProperty(globalThis, KEEP, { value: (value) => void (kept = value) })
  async function value(remote) {
    const call = `function (v) { this[Object.getOwnPropertySymbols(this).find((s) => s.description === 'kept')](v) }`
    const { result } = await post('Runtime.evaluate', { expression: 'globalThis' })
    const argument = 'objectId' in remote ? { objectId: remote.objectId }
      : 'unserializableValue' in remote ? { unserializableValue: remote.unserializableValue } : { value: remote.value }
    await post('Runtime.callFunctionOn', { objectId: result.objectId, functionDeclaration: call, arguments: [argument] })
    return kept
  }

  function show(result) {
    const bundle = result?.[Symbol.for('Jupyter.display')]
    const data = typeof bundle === 'function' ? bundle.call(result) : {}
    if (!('text/plain' in data)) data['text/plain'] = typeof result === 'string' ? result : util.inspect(result)
    emit({ type: 'bundle', data })
  }

  function fail(error) {
    const known = util.types.isNativeError(error)
    const name = known ? String(error.name) : 'Error'
    const message = known ? String(error.message) : typeof error === 'string' ? error : util.inspect(error)
    const stack = known && typeof error.stack === 'string' ? error.stack : `${name}: ${message}`
    emit({ type: 'error', name, value: message, traceback: trace(stack) })
  }

  // Without the frames that say nothing to the user: Node's own, this file's, and those without a place.
  function trace(stack) {
    return stack.split('\n').filter((line) => !/^\s+at (.*\()?(node:|.*kernel\.js:|<anonymous>\))/.test(line)).join('\n')
  }

  const interrupted = () =>
    Object.assign(new Error('the execution was interrupted'), { name: 'Interrupted', stack: 'Interrupted: the execution was interrupted' })

  async function evaluate(code, typescript) {
    if (typescript) code = stripTypeScriptTypes(code, { mode: 'transform' })
    const answer = await post('Runtime.evaluate', {
      expression: modules(code), replMode: true, awaitPromise: true,
    })
    if (answer.exceptionDetails) throw await value(answer.exceptionDetails.exception ?? answer.result)
    if (answer.result.type !== 'undefined') show(await value(answer.result))
  }

  async function run({ run: code, typescript }) {
    const stopped = new Promise((_, reject) => (abandon = () => reject(interrupted())))
    try {
      await Promise.race([evaluate(code, typescript), stopped])
    } catch (error) {
      // The inspector's own error is what a terminated run leaves.
      fail(error?.code === 'ERR_INSPECTOR_COMMAND' ? interrupted() : error)
    }
    abandon = null
    emit({ type: 'done' })
  }

  // The inspector evaluates scripts: `import` of both kinds becomes a call. Strings, templates and comments are passed over.
  const IMPORTS = new RegExp([
    String.raw`\/\/.*|\/\*[\s\S]*?\*\/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|` + '`(?:\\\\.|[^`\\\\])*`',
    String.raw`(?<![.\w$])import\s*(?<call>\()`,
    String.raw`(?<![.\w$])import\b\s*(?:(?<names>[\w$*{][\w$*{},\s]*?)\s*from\s*)?` +
      String.raw`(?<from>"[^"\n]+"|'[^'\n]+')(?:\s*with\s*(?<with>\{[^}]*\}))?`,
  ].join('|'), 'g')
  function modules(code) {
    return code.replace(IMPORTS, (text, ...rest) => {
      const part = rest.at(-1)
      if (part.call) return '__import('
      if (!part.from) return text
      const load = `await __import(${part.from}${part.with ? `, { with: ${part.with} }` : ''})`
      return part.names ? `const ${pattern(part.names)} = ${load}` : load
    })
  }
  function pattern(names) {
    const [, one, rest] = /^([\w$]+)?\s*,?\s*([\s\S]*)$/.exec(names)
    const space = /^\*\s*as\s+([\w$]+)$/.exec(rest)
    if (space) return one ? `{ default: ${one}, ...${space[1]} }` : space[1]
    const inner = rest.replace(/[{}]/g, '').split(',').map((n) => n.trim().replace(/\s+as\s+/, ': ')).filter(Boolean)
    return `{ ${[...(one ? [`default: ${one}`] : []), ...inner].join(', ')} }`
  }

  const here = process.cwd() + '/context.js'
  const hidden = (name, of) => Object.defineProperty(globalThis, name, { value: of, writable: true, configurable: true })
  hidden('require', createRequire(here))
  // A script's own `import()`, which looks for packages from the context's folder and not from this file's.
  hidden('__import', new vm.Script('(name, options) => import(name, options)', {
    filename: here, importModuleDynamically: vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER,
  }).runInThisContext())

  capture('stdout')
  capture('stderr')
  process.on('uncaughtException', (error) => process.stderr.write(`Uncaught ${trace(error?.stack ?? util.inspect(error))}\n`))
  process.on('SIGINT', () => {})
  const taken = new Int32Array(new SharedArrayBuffer(4))
  new Worker(__filename, { workerData: taken.buffer }).on('message', (command) => {
    if ('run' in command) run(command)
    else if ('env' in command) {
      for (const [name, text] of Object.entries(command.env)) {
        if (text === null) delete process.env[name]
        else process.env[name] = text
      }
    } else if (command.interrupt) {
      Atomics.add(taken, 0, 1)
      abandon?.()
    }
  }).on('exit', () => process.exit())
  emit({ type: 'ready' })
}
