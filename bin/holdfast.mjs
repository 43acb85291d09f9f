#!/usr/bin/env node
// The command line of holdfast.
import { readFileSync } from 'node:fs'
import { parseArgs } from 'node:util'
import { isLockError } from '../index.js'
import { BUSY, LOST, OUTPUT_FAILED, quoted, STORE_FAILED, USAGE, UsageError } from './cli/common.mjs'
import { completionScripts } from './cli/completion.mjs'
import { run } from './cli/run.mjs'
import { inspect, list, release, watch } from './cli/show.mjs'
import { complain } from './cli/text.mjs'
import { top } from './cli/top.mjs'

/** @typedef {import('./cli/common.mjs').Command} Command */

/** The options of all commands. The text before the first space is the argument; empty for a flag. */
const COMMON = {
  url: 'URL  the store; default: HOLDFAST_URL, or the embedded store of this user',
  'key-prefix':
    'TEXT  the prefix of every name in the store; default: "lock:" on Redis, "holdfast/" on etcd, none elsewhere',
  table: 'TEXT  the table in SQLite, PostgreSQL and MySQL; default: locks',
  collection: 'TEXT  the collection in MongoDB; default: locks',
  'ca-file': 'PATH  the PEM file of the certificate authority of the store, for TLS',
  'cert-file': 'PATH  the PEM file of the client certificate, for a store that requires one',
  'key-file': 'PATH  the PEM file of the private key of --cert-file',
  help: ' shows this text',
}
const JSON_OPTION = ' one JSON value per line'
const SHARED_OPTION = ' the name is that of a semaphore or a read/write lock'

/** @type {Record<string, Command>} */
const COMMANDS = {
  run: {
    usage: 'run [OPTION]... NAME... -- COMMAND [ARGUMENT]...',
    about:
      'Acquires the lock of all names, runs the command, and releases the lock. The exit code is that of the command.',
    options: {
      ttl: 'TIME  the duration of the lease, which is renewed while the command runs; default: 30s',
      wait: 'TIME  the longest wait for a busy name, or "forever"; default: 0; with --once-per 1s, at most half of that time',
      'min-hold': 'TIME  keeps the names busy for this long from the begin, if the command ends earlier',
      'once-per': 'TIME  a command that succeeded keeps the name busy for this long from its begin; for one name',
      limit: 'N  acquires a permit of the semaphore of the name: at most N permits are in use at the same time',
      permits: 'K  with --limit: the number of permits that the command needs; default: 1',
      read: ' acquires the read side of the read/write lock of the name',
      write: ' acquires the write side of the read/write lock of the name',
      'kill-after':
        'TIME  the time from SIGTERM to SIGKILL when the lock may be lost, or when processes outlive the command; default: 5s, at most a third of --ttl',
      'busy-code': 'CODE  the exit code when a name is busy; default: 75',
      foreground: ' leaves the command in the process group of the terminal, which it can read then',
    },
    run,
  },
  ls: {
    usage: 'ls [OPTION]... [PREFIX]',
    about: 'Lists the held locks whose names start with the prefix.',
    options: { json: JSON_OPTION },
    run: list,
  },
  list: { usage: 'list [OPTION]... [PREFIX]', about: 'The same as ls.', options: { json: JSON_OPTION }, run: list },
  inspect: {
    usage: 'inspect [OPTION]... NAME',
    about: 'Shows the holder of a name. The exit code is 0 if it is held, and 1 if it is free.',
    options: { json: JSON_OPTION, shared: SHARED_OPTION },
    run: inspect,
  },
  watch: {
    usage: 'watch [OPTION]... NAME',
    about: 'Shows the holder of a name, and each change, until it is interrupted.',
    options: {
      json: `${JSON_OPTION}; null if the name is free`,
      interval: 'TIME  the time between two reads; default: 1s',
    },
    run: watch,
  },
  top: {
    usage: 'top [OPTION]... [PREFIX]',
    about: 'Shows the held locks whose names start with the prefix, again and again, until it is interrupted.',
    options: {
      json: ' one JSON value per read; the default without a terminal',
      shared: `${SHARED_OPTION}, and the rows are its holders`,
      interval: 'TIME  the time between two reads; default: 1s',
    },
    run: top,
  },
  release: {
    usage: 'release --force [OPTION]... NAME',
    about:
      'Releases a name, no matter which process holds it. The exit code is 0 if it was held, and 1 if it was free.',
    options: { force: ' required: the holder loses the lock while it works', shared: SHARED_OPTION },
    run: release,
  },
  completion: {
    usage: 'completion bash|zsh',
    about: 'Prints a completion script for a shell.',
    options: {},
    run: completion,
  },
}

/** @param {string[]} args */
async function main([name, ...args]) {
  if (name === undefined || name === 'help' || name === '--help' || name === '-h') {
    console.log(overview())
    return name === undefined ? USAGE : 0
  }
  if (name === '--version') {
    console.log(JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8')).version)
    return 0
  }
  const command = Object.hasOwn(COMMANDS, name) ? COMMANDS[name] : undefined
  try {
    if (command === undefined) throw new UsageError(`there is no command ${JSON.stringify(name)}`)
    const end = args.includes('--') ? args.indexOf('--') : args.length
    const rest = args.slice(end + 1)
    if (rest.length > 0 && command !== COMMANDS.run) {
      throw new UsageError(`${quoted(rest)} after -- is unexpected: only run has a command there`)
    }
    /** @type {import('node:util').ParseArgsConfig['options']} */
    const options = {}
    for (const [option, text] of Object.entries({ ...COMMON, ...command.options })) {
      options[option] = { type: text.startsWith(' ') ? 'boolean' : 'string' }
    }
    let parsed
    try {
      parsed = parseArgs({ args: args.slice(0, end), options, allowPositionals: true })
    } catch (error) {
      throw new UsageError(/** @type {Error} */ (error).message.split('. ')[0])
    }
    const values = /** @type {import('./cli/common.mjs').Values} */ (parsed.values)
    if (values.help) {
      console.log(help(command))
      return 0
    }
    return await command.run(parsed.positionals, values, rest)
  } catch (error) {
    const code = exitCodeOf(error)
    if (code === undefined) throw error
    complain(/** @type {Error} */ (error).message)
    if (error instanceof UsageError) console.error(command ? `usage: holdfast ${command.usage}` : 'try "holdfast help"')
    return code
  }
}

/** @param {unknown} error */
function exitCodeOf(error) {
  if (error instanceof UsageError || isLockError(error, 'LOCK_INVALID_ARGUMENT')) return USAGE
  if (isLockError(error, 'LOCK_TIMEOUT')) return BUSY
  if (isLockError(error, 'LOCK_LOST')) return LOST
  return isLockError(error) ? STORE_FAILED : undefined
}

function overview() {
  const lines = Object.values(COMMANDS).map(({ usage, about }) => `  holdfast ${usage}\n      ${about}`)
  return `usage: holdfast COMMAND\n\n${lines.join('\n')}\n\n"holdfast COMMAND --help" shows the options, "holdfast --version" the version. Times: 500ms, 30s, 5m, 1h.`
}

/** @param {Command} command */
function help({ usage, about, options }) {
  const lines = Object.entries({ ...options, ...COMMON }).map(([option, text]) => {
    const [, argument, meaning] = /** @type {RegExpExecArray} */ (/^(\S*)\s+(.*)$/.exec(text))
    return `  ${`--${option} ${argument}`.padEnd(22)}  ${meaning}`
  })
  return `usage: holdfast ${usage}\n\n${about}\n\n${lines.join('\n')}`
}

/** @type {Command['run']} */
async function completion(shells) {
  const scripts = completionScripts(
    Object.fromEntries(
      Object.entries(COMMANDS).map(([name, { options }]) => [
        name,
        Object.keys({ ...options, ...COMMON }).map((option) => `--${option}`),
      ]),
    ),
  )
  const [shell] = shells
  if (shells.length !== 1 || !Object.hasOwn(scripts, shell)) {
    throw new UsageError(`expected bash or zsh, got ${shells.length ? quoted(shells) : 'none'}`)
  }
  console.log(scripts[shell])
  return 0
}

process.stdout.on('error', (/** @type {NodeJS.ErrnoException} */ error) => {
  // The exit code of a process that SIGPIPE ends: its reader, such as `head`, has all that it wants.
  if (error.code === 'EPIPE') process.exit(128 + 13)
  complain(`cannot write to standard output: ${error.message}`)
  process.exit(OUTPUT_FAILED)
})
// A message that nothing reads does not end the process while its command runs.
process.stderr.on('error', () => {})
process.exitCode = await main(process.argv.slice(2))
// Calls to a store that does not answer may still wait for it.
process.stdout.write('', (error) => {
  // After an error, the listener above ends the process.
  if (!error) process.exit()
})
