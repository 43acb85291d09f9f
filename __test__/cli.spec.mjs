// The command line: `bin/holdfast.mjs`.
import assert from 'node:assert/strict'
import { execFileSync, spawnSync } from 'node:child_process'
import { existsSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:net'
import { join } from 'node:path'
import { describe, test } from 'node:test'
import { redisTls } from '../scripts/certificates.mjs'
import { freePort, locateRedis, startRedis } from '../scripts/servers.mjs'
import { LockService } from '../index.js'
import { CLI, cli, folder, isInstalled, locks, settled, start, stateOf, TIMEOUT_MS, url } from './cli.mjs'
import { withMongo } from './mongodb-client.mjs'
import { startProxy } from './proxy.mjs'
import { canStartServer, missing, random, serverUrl, skip } from './stores.mjs'
import { sleep, until } from './tools.mjs'

describe('holdfast run', { concurrency: 4 }, () => {
  test('runs a command under the lock, and has its exit code', { timeout: TIMEOUT_MS }, async () => {
    const script = 'echo "$HOLDFAST_NAME $HOLDFAST_FENCING_TOKEN"; exit 7'
    const { code, stdout, stderr } = await cli('run', 'run:a', 'run:b', '--', 'sh', '-c', script)
    assert.match(stdout, /^run:a,run:b \d+\n$/)
    assert.deepEqual([code, stderr], [7, ''])
    assert.equal(await locks.inspect('run:a'), null)
    assert.equal((await cli('run', 'run:a', '--', 'sh', '-c', 'kill -TERM $$')).code, 128 + 15)
  })

  test('a busy name is 75, or another code, or a wait', { timeout: TIMEOUT_MS }, async () => {
    const lock = await locks.acquire('busy')
    const busy = await cli('run', 'busy', '--', 'echo', 'never')
    assert.deepEqual([busy.code, busy.stdout], [75, ''])
    assert.match(busy.stderr, new RegExp(`^holdfast: busy: busy, held by process ${process.pid} on `))
    assert.equal((await cli('run', '--busy-code', '0', 'busy', '--', 'echo', 'never')).code, 0)
    assert.equal((await cli('run', '--wait', '200ms', 'busy', '--', 'echo', 'never')).code, 75)
    const waits = start(['run', '--wait', 'forever', 'busy', '--', 'echo', 'ran'])
    const interrupted = start(['run', '--wait', 'forever', 'busy', '--', 'echo', 'never'])
    await until('both wait', async () => (await locks.inspect('busy'))?.waiting === 2)
    interrupted.child.kill('SIGINT')
    assert.deepEqual(await interrupted.ended, { code: 130, stdout: '', stderr: '' })
    await lock.release()
    assert.deepEqual(await waits.ended, { code: 0, stdout: 'ran\n', stderr: '' })
  })

  test('signals reach the whole process group', { timeout: TIMEOUT_MS }, async () => {
    const script = `trap 'echo parent; wait; exit 5' TERM; (trap 'echo child; exit' TERM; echo ready; sleep 60 & wait) & wait; wait`
    const { child, output, ended } = start(['run', 'group', '--', 'bash', '-c', script])
    await until('the command', () => output.stdout.includes('ready'))
    assert.ok(await locks.inspect('group'))
    child.kill('SIGTERM')
    const { code, stdout } = await ended
    assert.deepEqual([code, stdout.split('\n').sort().filter(Boolean)], [5, ['child', 'parent', 'ready']])
    assert.equal(await locks.inspect('group'), null)
  })

  test('forwards the other signals', { timeout: TIMEOUT_MS }, async () => {
    const signals = /** @type {const} */ (['SIGUSR1', 'SIGUSR2', 'SIGINT', 'SIGHUP', 'SIGQUIT'])
    const script = `for s in ${signals.join(' ')}; do trap "echo $s" $s; done; echo ready; while :; do sleep 0.05; done`
    const { child, output, ended } = start(['run', 'signals', '--', 'bash', '-c', script])
    await until('the command', () => output.stdout.includes('ready'))
    for (const signal of signals) {
      child.kill(signal)
      await until(signal, () => output.stdout.includes(signal))
    }
    child.kill('SIGTERM')
    assert.equal((await ended).code, 128 + 15)
  })

  test('no process of the group outlives the lock', { timeout: TIMEOUT_MS }, async () => {
    for (const [name, end, code] of /** @type {const} */ ([
      ['outlives:signal', 'SIGTERM', 0],
      ['outlives:lost', undefined, 76],
    ])) {
      const script = `bash -c 'trap "" TERM; echo child $$; while :; do sleep 0.05; done' & trap 'exit 0' TERM; echo parent $$; while :; do sleep 0.05; done`
      const args = ['run', '--ttl', '9s', '--kill-after', '3s', name, '--', 'bash', '-c', script]
      const { child, output, ended } = start(args)
      const pidOf = (/** @type {string} */ which) => Number(new RegExp(`${which} (\\d+)\n`).exec(output.stdout)?.[1])
      await until('the command', () => pidOf('child') && pidOf('parent'))
      const pid = pidOf('child')
      if (end) {
        child.kill(end)
        await until('the end of its parent', () => stateOf(pidOf('parent')) === '-')
        assert.ok(await locks.inspect(name))
      } else await locks.forceRelease(name)
      assert.equal((await ended).code, code)
      assert.equal(stateOf(pid), '-')
      assert.equal(await locks.inspect(name), null)
    }
  })

  test('SIGTSTP stops the command, SIGCONT continues it while the lock is held', { timeout: TIMEOUT_MS }, async () => {
    const script = `echo $$; while :; do echo tick; done`
    const { child, output, ended } = start(['run', '--ttl', '9s', 'stopped', '--', 'bash', '-c', script])
    await until('the command', () => output.stdout.includes('tick'))
    const pid = Number(/\d+/.exec(output.stdout)?.[0])
    const stop = async () => {
      child.kill('SIGTSTP')
      await until('the stop', () => stateOf(child.pid) === 'T' && stateOf(pid) === 'T')
      return settled(() => output.stdout.length)
    }
    const before = await stop()
    child.kill('SIGCONT')
    await until('a tick', () => output.stdout.length > before)
    const printed = await stop()
    await until('the end of the lease', async () => (await locks.inspect('stopped')) === null)
    const next = await locks.acquire('stopped')
    child.kill('SIGCONT')
    const { code, stdout, stderr } = await ended
    assert.deepEqual([code, stdout.length, stateOf(pid)], [76, printed, '-'])
    assert.match(stderr, /^holdfast: the lock "stopped" is lost: [^]*: SIGKILL to the command\n/m)
    assert.ok(next.isHeld)
    await next.release()
  })

  test('a command that has lost its lock is killed, and the code is 76', { timeout: TIMEOUT_MS }, async () => {
    const { output, ended } = start(['run', '--ttl', '6s', 'lost', '--', 'sh', '-c', 'echo ready; sleep 60'])
    await until('the command', () => output.stdout.includes('ready'))
    await locks.forceRelease('lost')
    const { code, stderr } = await ended
    assert.equal(code, 76)
    assert.match(stderr, /^holdfast: the lock "lost" is lost: [^\n]+: SIGKILL to the command\n$/)
  })

  test('a command is stopped before its lease ends', { timeout: TIMEOUT_MS }, async () => {
    const own = mkdtempSync(join(folder, 'outage-'))
    const file = join(own, 'locks.sqlite')
    const script = `trap 'echo stopped; exit 0' TERM; echo ready; while :; do sleep 0.05; done`
    const { output, ended } = start(['run', '--ttl', '9s', 'outage', '--', 'sh', '-c', script], {
      HOLDFAST_URL: `sqlite:${file}`,
    })
    await until('the command', () => output.stdout.includes('ready'))
    const other = await LockService.connect(`sqlite:${file}`)
    const { remainingMs } = (await other.inspect('outage')) ?? assert.fail('it is not held')
    const endsBy = performance.now() + remainingMs + 3000
    await other.close()
    // The store fails: its folder is a file now.
    rmSync(own, { recursive: true })
    writeFileSync(own, '')
    const { code, stdout, stderr } = await ended
    assert.deepEqual([code, stdout], [76, 'ready\nstopped\n'])
    assert.match(
      stderr,
      // The shell may report the end of `sleep` before.
      /^holdfast: the lock "outage" was not renewed: calls to the store failed \(\d+\)\. Its lease ends in \d+ ms: SIGTERM to the command\n/m,
    )
    assert.ok(performance.now() < endsBy)
  })

  test('once per period, and again after a failure', { timeout: TIMEOUT_MS }, async () => {
    const once = (/** @type {string} */ script) => cli('run', '--once-per', '1h', 'once', '--', 'sh', '-c', script)
    assert.equal((await once('exit 3')).code, 3)
    assert.deepEqual(await once('echo ran'), { code: 0, stdout: 'ran\n', stderr: '' })
    assert.equal((await once('echo ran')).code, 75)
    const lock = await locks.acquire('once:busy')
    /** @type {ReturnType<typeof cli> | undefined} */
    let waits
    // The default of --wait is 1 s. A machine that stands still may hide one call.
    await until('a call that waits', async () => {
      waits ??= cli('run', '--once-per', '1h', 'once:busy', '--', 'true').finally(() => (waits = undefined))
      return (await locks.inspect('once:busy'))?.waiting === 1
    })
    await Promise.all([waits, lock.release()])
    assert.equal((await cli('run', '--min-hold', '1h', 'held', '--', 'true')).code, 0)
    assert.equal((await cli('run', 'held', '--', 'true')).code, 75)
  })

  test('what cannot run', { timeout: TIMEOUT_MS }, async () => {
    assert.deepEqual(await cli('run', 'n', '--', 'no-such-command'), {
      code: 127,
      stdout: '',
      stderr: 'holdfast: no-such-command: there is no such command\n',
    })
    const file = join(folder, 'a-file')
    writeFileSync(file, '#!/bin/sh\n')
    assert.equal((await cli('run', 'n', '--', join(file, 'nested'))).code, 127)
    for (const notExecutable of [folder, file]) {
      const { code, stderr } = await cli('run', 'n', '--', notExecutable)
      assert.deepEqual([code, stderr], [126, `holdfast: ${notExecutable}: spawn ${notExecutable} EACCES\n`])
    }
    // Node.js throws this one.
    const loop = join(folder, 'loop')
    symlinkSync(loop, loop)
    assert.equal((await cli('run', 'n', '--', loop)).code, 126)
    const nowhere = await cli('run', '--url', 'redis://127.0.0.1:1', 'n', '--', 'true')
    assert.deepEqual([nowhere.code, nowhere.stdout], [69, ''])
    assert.match(nowhere.stderr, /^holdfast: /)
  })
})

describe('holdfast', { concurrency: 4 }, () => {
  test('usage errors are 64 and name the argument', { timeout: TIMEOUT_MS }, async () => {
    for (const [args, text] of /** @type {[string[], string][]} */ ([
      [['nope'], 'there is no command "nope"'],
      [['run', '--', 'true'], 'a name is missing'],
      [['run', 'n'], 'a command is missing'],
      [['run', '--ttl', '5', 'n', '--', 'true'], '--ttl must be a time'],
      [['run', '--wait', 'soon', 'n', '--', 'true'], '--wait must be a time'],
      [['run', 'n', '--'], 'a command is missing'],
      [['run', 'n', '--', ''], 'a command is missing'],
      [['run', '--busy-code', '', 'n', '--', 'true'], '--busy-code must be a number from 0 to 255, got ""'],
      [['run', '--busy-code', '999', 'n', '--', 'true'], '--busy-code must be a number'],
      [['run', '--once-per', '1h', 'a', 'b', '--', 'true'], 'expected one name'],
      [
        ['run', '--once-per', '1h', '--min-hold', '2h', 'n', '--', 'true'],
        '--min-hold and --once-per exclude each other',
      ],
      [['run', '--nope', 'n', '--', 'true'], '--nope'],
      [['run', 'n'.repeat(600), '--', 'true'], 'name '],
      [['inspect'], 'expected one name'],
      [['top', '--interval', '0'], '--interval must be more than 0'],
      [['watch', '--interval', '0', 'n'], '--interval must be more than 0'],
      [['top', '--interval', '600h'], '--interval must be more than 0, at most 24 days, got "600h"'],
      [['ls', '--', 'extra'], '"extra" after -- is unexpected'],
      [['inspect', 'n', '--', 'extra'], '"extra" after -- is unexpected'],
      [['inspect', 'n', 'e\u202ex'], 'expected one name, got "n", "e\\u202ex"'],
      [['completion', 'bash', 'extra'], 'expected bash or zsh, got "bash", "extra"'],
      [['ls', 'a', 'b'], 'expected one prefix'],
      [['release', 'n'], '--force is missing'],
      [['completion', 'fish'], 'expected bash or zsh'],
      [['ls', '--url', 'memory:'], 'memory: is a store of one process'],
    ])) {
      const { code, stdout, stderr } = await cli(...args)
      assert.deepEqual([code, stdout, stderr.includes(text)], [64, '', true], `${args}: ${stderr}`)
    }
    assert.equal((await cli()).code, 64)
    for (const args of [['help'], ['run', '--help']]) {
      const { code, stdout } = await cli(...args)
      assert.deepEqual([code, stdout.startsWith('usage: holdfast ')], [0, true])
    }
    const { version } = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8'))
    assert.deepEqual(await cli('--version'), { code: 0, stdout: `${version}\n`, stderr: '' })
  })

  test('ls, inspect and release', { timeout: TIMEOUT_MS }, async () => {
    const lock = await locks.acquire('shown:1', { metadata: { why: 'a test\u001b[2J' } })
    const listed = await cli('ls', '--json', 'shown:')
    const [info, ...rest] = listed.stdout
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line))
    assert.deepEqual(
      [listed.code, rest, info.name, info.fencingToken, info.holder.pid, info.waiting],
      [0, [], 'shown:1', String(lock.fencingToken), process.pid, 0],
    )
    const { stdout } = await cli('ls', 'shown:')
    assert.match(
      stdout,
      /^NAME +WAITING +PROCESS +SINCE +REMAINING +TOKEN +METADATA\nshown:1 +0 +\d+ on \S+ +\S+Z +\d+\.\ds +\d+ +\{"why":"a test/,
    )
    assert.equal((await cli('ls', 'nothing:')).stdout, '')
    assert.match((await cli('list', 'shown:')).stdout, /^NAME .*\nshown:1 /)
    assert.equal((await cli('inspect', 'shown:1')).code, 0)
    assert.deepEqual(await cli('inspect', 'shown:2'), { code: 1, stdout: 'shown:2 is free\n', stderr: '' })
    assert.deepEqual(await cli('inspect', '--json', 'shown:2'), { code: 1, stdout: 'null\n', stderr: '' })
    assert.equal((await cli('release', '--force', 'shown:1')).code, 0)
    assert.equal((await cli('release', '--force', 'shown:1')).code, 1)
  })

  test('what a terminal would execute or reorder is escaped', { timeout: TIMEOUT_MS }, async () => {
    const name = 'safe:\u001b[2J\u202e\u2066\u200f\u009b'
    const shown = 'safe:\\u001b[2J\\u202e\\u2066\\u200f\\u009b'
    const watching = start(['watch', '--interval', '50ms', name])
    await until('free', () => watching.output.stdout.includes('is free'))
    const lock = await locks.acquire(name, { metadata: { text: name } })
    await until('held', () => watching.output.stdout.includes('is held'))
    watching.child.kill('SIGINT')
    const outputs = [
      await watching.ended,
      await cli('ls', 'safe:'),
      await cli('inspect', name),
      await cli('run', name, '--', 'true'),
      await cli('inspect', name, name),
      await cli('release', '--force', name),
      await cli('inspect', name),
    ]
    for (const { stdout, stderr } of outputs) {
      assert.ok((stdout + stderr).includes(shown), stdout + stderr)
      // eslint-disable-next-line no-control-regex
      assert.doesNotMatch(
        stdout + stderr,
        /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/,
      )
    }
    await lock.release().catch(() => {})
    await locks.using(name, async () => {
      assert.equal(JSON.parse((await cli('ls', '--json', 'safe:')).stdout).name, name)
    })
  })

  test('ends quietly when the reader of its output has ended', { timeout: TIMEOUT_MS }, async () => {
    for (const args of [['top', '--interval', '50ms'], ['help'], ['ls', '--json', 'piped:']]) {
      const { code, stderr } = await locks.using('piped:1', () => {
        const { child, ended } = start(args)
        child.stdout.destroy()
        return ended
      })
      assert.deepEqual([code, stderr], [141, ''], args[0])
    }
  })

  test('output that cannot be written is 74', { timeout: TIMEOUT_MS }, (t) => {
    if (!existsSync('/dev/full')) return t.skip('no /dev/full')
    const { status, stderr } = spawnSync('sh', ['-c', 'exec "$0" "$1" help > /dev/full', process.execPath, CLI])
    assert.equal(status, 74)
    assert.match(String(stderr), /^holdfast: cannot write to standard output: ENOSPC/)
  })

  test('watch and top, without a terminal', { timeout: TIMEOUT_MS }, async () => {
    const watching = start(['watch', '--interval', '50ms', 'watched'])
    const json = start(['watch', '--interval', '50ms', '--json', 'watched'])
    const top = start(['top', '--interval', '50ms', 'watched'])
    for (const { output } of [watching, json, top]) await until('free', () => output.stdout.includes('\n'))
    const lock = await locks.acquire('watched')
    await until('held', () => watching.output.stdout.includes('watched is held by process'))
    await until('held', () => json.output.stdout.split('\n').length > 2)
    await until('held', () => top.output.stdout.includes('"watched"'))
    await lock.release()
    await until('free', () => watching.output.stdout.trim().endsWith('watched is free'))
    for (const { child } of [watching, json, top]) child.kill('SIGINT')
    const ended = await Promise.all([watching.ended, json.ended, top.ended])
    assert.deepEqual(
      ended.map(({ code }) => code),
      [0, 0, 0],
    )
    assert.equal(JSON.parse(ended[1].stdout.split('\n')[0]), null)
    assert.deepEqual(JSON.parse(ended[2].stdout.split('\n')[0]), [])
  })

  test('top waits for its store, unless no waiting helps', { timeout: TIMEOUT_MS }, async () => {
    const { child, output, ended } = start(['top', '--interval', '50ms', '--url', 'redis://127.0.0.1:1'])
    await until('the outage', () => output.stderr.includes('\n'))
    // Several reads.
    await sleep(500)
    child.kill('SIGINT')
    const { code, stdout, stderr } = await ended
    assert.deepEqual([code, stdout], [0, ''])
    assert.match(stderr, /^holdfast: no answer from the store since \S+Z: [^\n]+\n$/)
    const file = join(folder, 'top')
    writeFileSync(file, '')
    assert.equal((await cli('top', '--url', `sqlite:${join(file, 'locks.sqlite')}`)).code, 69)
  })

  test('top goes on through an outage', { timeout: TIMEOUT_MS }, async (t) => {
    const reason = missing('redis')
    if (reason) return skip(t, reason)
    const server = new URL(String(serverUrl('redis')))
    const proxy = await startProxy(Number(server.port))
    server.port = String(proxy.port)
    const { child, output, ended } = start(['top', '--interval', '50ms', '--url', server.href, 'nothing:'])
    const read = () => until('a read', () => output.stdout.length > length)
    let length = 0
    await read()
    await proxy.down()
    await until('the outage', () => /^holdfast: no answer from the store since \S+Z: ./.test(output.stderr))
    length = output.stdout.length
    await proxy.up()
    await read()
    assert.match(output.stderr, /^[^\n]+\nholdfast: the store answers again\n$/)
    child.kill('SIGINT')
    assert.equal((await ended).code, 0)
    await proxy.close()
  })

  test('an interrupt ends a command at once, also while it connects', { timeout: TIMEOUT_MS }, async () => {
    // Accepts connections, and does not answer.
    const sockets = new Set()
    const server = createServer((socket) => sockets.add(socket))
    await new Promise((resolve) => server.listen(0, '127.0.0.1', () => resolve(undefined)))
    const { port } = /** @type {import('node:net').AddressInfo} */ (server.address())
    const env = { HOLDFAST_URL: `redis://127.0.0.1:${port}` }
    try {
      for (const [args, code] of /** @type {[string[], number][]} */ ([
        [['top'], 0],
        [['watch', 'n'], 0],
        [['run', 'n', '--', 'true'], 130],
      ])) {
        const connections = sockets.size
        const { child, ended } = start(args, env)
        await until('a connection', () => sockets.size > connections)
        child.kill('SIGINT')
        // Without an interrupt, the error of the store comes after 5 s.
        assert.deepEqual(await ended, { code, stdout: '', stderr: '' }, args[0])
      }
      const { child, output, ended } = start(['top'], env)
      await until('the outage', () => output.stderr.includes('it has not answered yet'))
      child.kill('SIGINT')
      assert.equal((await ended).code, 0)
    } finally {
      for (const socket of sockets) socket.destroy()
      server.close()
    }
  })

  test('the completion scripts complete commands and options', { timeout: TIMEOUT_MS }, async (t) => {
    /** @param {string} shell @param {string[]} flags @param {(words: string[]) => string} call */
    const complete = async (shell, flags, call) => {
      const { code, stdout } = await cli('completion', shell)
      assert.equal(code, 0)
      const file = join(folder, `completion.${shell}`)
      writeFileSync(file, stdout)
      return (/** @type {string[]} */ ...words) => {
        const args = [...flags, '-c', `${call(words).replace('SOURCE', `source '${file}'`)}`]
        return execFileSync(shell, args, { encoding: 'utf8' }).trim().split(/\s+/)
      }
    }
    const bash = await complete(
      'bash',
      ['--norc'],
      (words) =>
        `SOURCE; COMP_WORDS=(holdfast ${words.join(' ')}); COMP_CWORD=${words.length}; _holdfast; echo "\${COMPREPLY[@]}"`,
    )
    assert.deepEqual(bash('in'), ['inspect'])
    assert.deepEqual(bash('list', '--j'), ['--json'])
    assert.deepEqual(bash('top', '--sh'), ['--shared'])
    assert.deepEqual(bash('run', '--p'), ['--permits'])
    assert.deepEqual(bash('run', '--k'), ['--kill-after', '--key-prefix', '--key-file'])
    assert.match(
      execFileSync('bash', ['-c', `source '${folder}/completion.bash'; complete -p holdfast`], { encoding: 'utf8' }),
      /_holdfast/,
    )
    assert.match((await cli('completion', 'zsh')).stdout, /^#compdef holdfast\n/)
    if (!isInstalled('zsh', '--version')) return t.skip('no zsh: its completion script is not run')
    // The functions of its completion system, which exist only while a user types.
    const zsh = await complete(
      'zsh',
      ['-f'],
      (words) =>
        `compdef() { print -- "$@" }; compadd() { shift; print -- "$@" }; _files() {}; SOURCE; words=(holdfast ${words.join(' ')}); CURRENT=${words.length + 1}; _holdfast`,
    )
    assert.deepEqual(zsh('in').slice(0, 4), ['_holdfast', 'holdfast', 'run', 'ls'])
    assert.ok(zsh('run', '--k').includes('--kill-after'))
    assert.ok(!zsh('ls', '--k').includes('--kill-after'))
    // In a folder of $fpath, also at the first use.
    writeFileSync(join(folder, '_holdfast'), readFileSync(join(folder, 'completion.zsh')))
    const first = `fpath=('${folder}'); autoload -Uz _holdfast; compadd() { print -- "$@" }; _files() {}; words=(holdfast ''); CURRENT=2; _holdfast`
    assert.match(execFileSync('zsh', ['-f', '-c', first], { encoding: 'utf8' }), /^-- run ls /)
  })
})

describe('the store of a service', { concurrency: 2 }, () => {
  /** Asserts that a lock of a service and one of the command line exclude each other, only with these arguments. */
  const excludes = async (service, args, other) => {
    const name = `of:${random()}`
    await service.using(name, async () => {
      const busy = await cli('run', ...args, name, '--', 'echo', 'never')
      assert.deepEqual([busy.code, busy.stdout], [75, ''])
      assert.match((await cli('ls', ...args, name)).stdout, new RegExp(name))
      assert.deepEqual(await cli('run', ...other, name, '--', 'echo', 'ran'), { code: 0, stdout: 'ran\n', stderr: '' })
    })
    await service.close()
  }

  test('--table', { timeout: TIMEOUT_MS }, async () => {
    await excludes(await LockService.connect(url, { table: 'jobs' }), ['--table', 'jobs'], [])
    const { code, stderr } = await cli('ls', '--table', 'app.jobs')
    assert.equal(code, 64)
    assert.match(stderr, /^holdfast: table must be 1 to 51 letters, digits and underscores, .*"app\.jobs"\n/)
    assert.match((await cli('ls', '--table', 'x', '--url', 'redis://h')).stderr, /^holdfast: table must be absent for/)
  })

  test('--collection and --key-prefix', { timeout: TIMEOUT_MS }, async (t) => {
    const reason = missing('mongodb')
    if (reason) return skip(t, reason)
    const [server, collection] = [String(serverUrl('mongodb')), `cli_${random()}`]
    const other = ['--url', server, '--key-prefix', 'p:']
    const service = await LockService.connect(server, { collection, keyPrefix: 'p:' })
    t.after(() => withMongo(server, (client) => client.db().dropCollection(collection)))
    await excludes(service, [...other, '--collection', collection], [...other, '--collection', `${collection}_2`])
    await withMongo(server, (client) => client.db().dropCollection(`${collection}_2`))
  })

  test('--ca-file, or SSL_CERT_FILE', { timeout: TIMEOUT_MS }, async (t) => {
    if (!(await canStartServer(t, 'redis', locateRedis))) return
    const tls = await redisTls().catch((error) => skip(t, `no openssl: ${error.message}`))
    if (!tls) return
    t.after(() => tls.remove())
    const port = await freePort()
    const args = tls.settings(port).flatMap(([name, value]) => [`--${name}`, value])
    const server = await startRedis({ args }).catch(() => skip(t, 'this Redis has no TLS'))
    if (!server) return
    t.after(() => server.stop())
    const secured = `rediss://127.0.0.1:${port}`
    const refused = await cli('ls', '--url', secured)
    assert.equal(refused.code, 69)
    assert.match(refused.stderr, /authority that is not trusted here/)
    assert.equal((await cli('ls', '--url', secured, '--ca-file', tls.caFile)).code, 0)
    assert.equal((await start(['ls', '--url', secured], { SSL_CERT_FILE: tls.caFile }).ended).code, 0)
    const withoutTls = /** @type {[string, RegExp][]} */ ([
      [server.url, /^holdfast: target must begin with rediss:\/\/ .*got a URL without TLS\n/],
      [url, /^holdfast: tls must be absent for a store other than .*got a URL of sqlite:\n/],
    ])
    for (const [target, message] of withoutTls) {
      const { code, stderr } = await cli('ls', '--url', target, '--ca-file', tls.caFile)
      assert.equal(code, 64)
      assert.match(stderr, message)
    }
  })
})
