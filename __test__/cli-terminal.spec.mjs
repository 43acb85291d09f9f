// The command line in a real terminal: in tmux, and in that of `script`.
import assert from 'node:assert/strict'
import { execFileSync, spawn } from 'node:child_process'
import { existsSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { after, describe, test } from 'node:test'
import { CLI, folder, isInstalled, locks, settled, TIMEOUT_MS, url } from './cli.mjs'
import { skip } from './stores.mjs'
import { sleep, until } from './tools.mjs'

const SOCKET = `holdfast-${process.pid}`
const COLUMNS = 60
const ROWS = 12

const tmux = (/** @type {string[]} */ ...args) => execFileSync('tmux', ['-L', SOCKET, ...args], { encoding: 'utf8' })
const command = (/** @type {string} */ rest) => `HOLDFAST_URL='${url}' '${process.execPath}' '${CLI}' ${rest}`

/** Starts a command in a terminal of tmux. @param {string} session @param {string} line */
function open(session, line) {
  // A server that ends with its last session would refuse a session that begins meanwhile.
  const size = ['-x', String(COLUMNS), '-y', String(ROWS)]
  tmux('start-server', ';', 'set', '-s', 'exit-empty', 'off', ';', 'new-session', '-d', '-s', session, ...size, line)
  return {
    screen: () => tmux('capture-pane', '-p', '-t', session),
    send: (/** @type {string[]} */ ...keys) => void tmux('send-keys', '-t', session, ...keys),
    hasEnded: () => {
      try {
        return tmux('has-session', '-t', session) === 'unreachable'
      } catch {
        return true
      }
    },
  }
}

describe('holdfast in a terminal', { concurrency: 1 }, () => {
  const hasTmux = isInstalled('tmux', '-V')
  after(() => {
    try {
      if (hasTmux) tmux('kill-server')
    } catch {
      // It has ended.
    }
  })

  test('top redraws, within the width and the height', { timeout: TIMEOUT_MS }, async (t) => {
    if (!hasTmux) return skip(t, 'no tmux')
    const lock = await locks.acquire('terminal:1')
    const { screen, send, hasEnded } = open('top', command('top --interval 100ms terminal:'))
    await until('a table', () => /1 held\n\nNAME {8}WAITING  PROCESS.*\nterminal:1  0 {8}\d+ on /.test(screen()))
    const controller = new AbortController()
    const calls = [1, 2, 3].map(() => locks.acquire('terminal:1', { waitMs: '60s', signal: controller.signal }))
    await until('three waiting calls', () => /\nterminal:1  3 /.test(screen()))
    controller.abort()
    await Promise.allSettled(calls)
    await until('no waiting call', () => /\nterminal:1  0 /.test(screen()))
    const many = await Promise.all(
      Array.from({ length: 20 }, (_, n) => locks.acquire(`terminal:${'名'.repeat(40)}${n}`)),
    )
    await until('the rest', () => screen().includes('… and 14 more'))
    const lines = screen().trimEnd().split('\n')
    assert.equal(lines.length, ROWS - 1, screen())
    assert.match(lines[0], /Z {2}21 held$/)
    assert.match(lines[2], /^NAME .*…$/)
    assert.match(lines[9], /^terminal:名{25}…$/)
    for (const held of [lock, ...many]) await held.release()
    await until('an empty table', () => /0 held\n\nNAME/.test(screen()) && !/^terminal/m.test(screen()))
    send('C-c')
    await until('the end', hasEnded)
  })

  test('a foreground command reads the terminal', { timeout: TIMEOUT_MS }, async (t) => {
    if (!hasTmux) return skip(t, 'no tmux')
    const shown = join(folder, 'read')
    const script = `'read line; echo "read $line" > ${shown}'`
    const { send } = open('foreground', command(`run --foreground foreground -- sh -c ${script}`))
    await until('the lock', () => locks.inspect('foreground'))
    await sleep(300)
    send('hello', 'Enter')
    await until('the line', () => existsSync(shown) && readFileSync(shown, 'utf8') === 'read hello\n')
  })

  for (const flag of ['', '--foreground']) {
    test(`Ctrl-Z stops a command ${flag}, and fg continues it`, { timeout: TIMEOUT_MS }, async (t) => {
      if (!hasTmux) return skip(t, 'no tmux')
      const name = `suspended${flag}`
      const ticks = join(folder, name)
      const count = () => (existsSync(ticks) ? readFileSync(ticks, 'utf8').length : 0)
      const { screen, send } = open(`z${flag.length}`, 'bash --norc --noprofile')
      const script = `'while :; do printf . >> ${ticks}; sleep 0.05; done'`
      send(command(`run --ttl 9s ${flag} ${name} -- sh -c ${script}; echo code=$?`), 'Enter')
      await until('a tick', () => count() > 0)
      const stop = async () => {
        send('C-z')
        await until('the shell', () => /Stopped/.test(screen()))
        return settled(count)
      }
      const before = await stop()
      send('clear; fg', 'Enter')
      await until('a tick', () => count() > before)
      const last = await stop()
      const next = await locks.acquire(name, { waitMs: '20s' })
      assert.equal(count(), last)
      send('clear; fg; echo code=$?', 'Enter')
      await until('the end', () => screen().includes('code=76'))
      // In the foreground the shell continues the command as well.
      if (!flag) assert.equal(count(), last)
      const atEnd = count()
      await sleep(300)
      assert.deepEqual([count(), next.isHeld], [atEnd, true])
      await next.release()
    })
  }

  // A terminal of an unknown size has 0 rows and 0 columns.
  for (const [rows, columns] of [
    [10, 40],
    [0, 0],
  ]) {
    test(`top in the terminal of script, ${rows} by ${columns}`, { timeout: TIMEOUT_MS }, async (t) => {
      if (process.platform !== 'linux' || !isInstalled('script', '--version')) return skip(t, 'no script of util-linux')
      const lock = await locks.acquire('scripted')
      // `script` starts $SHELL, or sh. dash would end with the SIGINT that it receives together with `top`.
      const line = `trap : INT; stty rows ${rows} cols ${columns}; ${command('top --interval 100ms scripted')}; echo code=$?`
      const script = spawn('script', ['-q', '-c', line, join(folder, 'typescript')])
      let output = ''
      script.stdout.on('data', (data) => (output += data))
      const ended = new Promise((resolve) => script.on('close', resolve))
      // eslint-disable-next-line no-control-regex
      await until('a table', () => /1 held\x1b\[K\r\n\x1b\[K\r\nNAME .*…\x1b\[K\r\nscripted /.test(output))
      script.stdin.write('\x03')
      await ended
      assert.match(output, /code=0/)
      await lock.release()
    })
  }
})
