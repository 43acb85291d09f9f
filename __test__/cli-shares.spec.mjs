// The command line on semaphores and read/write locks: `run --limit`, `--read` and `--write`, and `--shared` of the others.
import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import { cli, locks, start, TIMEOUT_MS } from './cli.mjs'
import { KINDS } from './stores.mjs'
import { until } from './tools.mjs'

const options = { concurrency: 4, skip: KINDS.sqlite.shares ? false : 'SQLite has no semaphores' }
const timeout = TIMEOUT_MS
const table = (/** @type {string} */ share) =>
  `\\nSHARE +PROCESS +SINCE +REMAINING +TOKEN +METADATA\\n${share} +\\d+ on .*\\n`

describe('semaphores and read/write locks', options, () => {
  test('usage errors are 64 and name the argument', { timeout }, async () => {
    for (const [args, text] of /** @type {[string[], string][]} */ ([
      [['run', '--limit', '1.5', 'n', '--', 'true'], '--limit must be a whole number, got "1.5"'],
      [['run', '--limit', '', 'n', '--', 'true'], '--limit must be a whole number, got ""'],
      [['run', '--limit', '0', 'n', '--', 'true'], 'limit must be a whole number from 1 to 1048576, got 0'],
      [
        ['run', '--limit', '2', '--permits', '3', 'n', '--', 'true'],
        'permits must be a whole number from 1 to the limit',
      ],
      [['run', '--limit', '2', '--permits', '-1', 'n', '--', 'true'], '--permits'],
      [['run', '--permits', '2', 'n', '--', 'true'], '--permits needs --limit'],
      [['run', '--permits', '2', '--read', 'n', '--', 'true'], '--permits needs --limit'],
      [['run', '--read', '--write', 'n', '--', 'true'], '--read and --write exclude each other'],
      [['run', '--limit', '2', '--write', 'n', '--', 'true'], '--limit and --write exclude each other'],
      [['run', '--read', '--once-per', '1h', 'n', '--', 'true'], '--read and --once-per exclude each other'],
      [['run', '--limit', '2', 'a', 'b', '--', 'true'], 'expected one name, got "a", "b"'],
      [['inspect', '--shared', 'a', 'b'], 'expected one name'],
      [['top', '--shared'], 'expected one name'],
      [['release', '--shared', 'n'], '--force is missing'],
    ])) {
      const { code, stdout, stderr } = await cli(...args)
      assert.deepEqual([code, stdout, stderr.includes(text)], [64, '', true], `${args}: ${stderr}`)
    }
  })

  test('run --limit runs the command with its permits', { timeout }, async () => {
    const semaphore = locks.semaphore('run:models', 3)
    const script = 'echo "$HOLDFAST_NAME $HOLDFAST_PERMITS $HOLDFAST_FENCING_TOKEN"; exit 7'
    const run = (/** @type {string[]} */ ...args) => cli('run', ...args, 'run:models', '--', 'sh', '-c', script)
    const { code, stdout, stderr } = await run('--limit', '3', '--permits', '2')
    assert.match(stdout, /^run:models 2 \d+\n$/)
    assert.deepEqual([code, stderr], [7, ''])
    const held = await semaphore.acquire({ permits: 2 })
    assert.match((await run('--limit', '3')).stdout, /^run:models 1 \d+\n$/)
    const busy = await run('--limit', '3', '--permits', '2')
    assert.deepEqual([busy.code, busy.stdout], [75, ''])
    assert.match(busy.stderr, new RegExp(`^holdfast: run:models: busy, held by process ${process.pid} on `))
    // A lock of that name is another name.
    assert.match((await run()).stdout, /^run:models {2}\d+\n$/)
    const waits = start(['run', '--limit', '3', '--permits', '2', '--wait', '30s', 'run:models', '--', 'echo', 'ran'])
    await until('it waits', async () => (await semaphore.inspect()).waiting === 1)
    assert.equal(await held.release(), true)
    assert.deepEqual(await waits.ended, { code: 0, stdout: 'ran\n', stderr: '' })
    assert.equal((await cli('run', '--limit', '2', '--min-hold', '1h', 'run:kept', '--', 'true')).code, 0)
    assert.equal((await locks.semaphore('run:kept', 2).inspect()).used, 1)
  })

  test('run --read and --write exclude each other', { timeout }, async () => {
    const { read, write } = locks.readWriteLock('run:schema')
    const run = async (/** @type {string} */ side) => (await cli('run', side, 'run:schema', '--', 'true')).code
    await read.using(async () => assert.deepEqual([await run('--read'), await run('--write')], [0, 75]))
    await write.using(async () => assert.deepEqual([await run('--read'), await run('--write')], [75, 75]))
    assert.equal(await run('--write'), 0)
  })

  test('a command that has lost its permit is killed, and the code is 76', { timeout }, async () => {
    for (const [args, what] of [
      [['--limit', '2'], 'permit of'],
      [['--write'], 'write lock'],
    ]) {
      const { output, ended } = start([
        'run',
        '--ttl',
        '2s',
        ...args,
        'run:lost',
        '--',
        'sh',
        '-c',
        'echo on; sleep 60',
      ])
      await until('the command', () => output.stdout.includes('on'))
      assert.equal((await cli('release', '--force', '--shared', 'run:lost')).code, 0)
      const { code, stderr } = await ended
      assert.equal(code, 76)
      assert.match(stderr, new RegExp(`^holdfast: the ${what} "run:lost" is lost: [^\n]+: SIGKILL to the command\n$`))
    }
  })

  test('inspect, release and top with --shared', { timeout }, async () => {
    const [name, semaphore] = ['shown', locks.semaphore('shown', 5)]
    const top = start(['top', '--shared', '--interval', '50ms', name])
    await until('free', () => top.output.stdout.includes('\n'))
    assert.deepEqual(await cli('inspect', '--shared', name), { code: 1, stdout: 'shown is free\n', stderr: '' })
    assert.deepEqual(JSON.parse((await cli('inspect', '--shared', '--json', name)).stdout).used, 0)
    const held = await semaphore.acquire({ permits: 2, metadata: { why: '\u001b[2J' } })
    const { code, stdout } = await cli('inspect', '--shared', name)
    assert.equal(code, 0)
    assert.match(stdout, new RegExp(`^shown: 2 of 5 permits in use, 0 waiting${table('2 of 5')}$`))
    assert.match(stdout, /\{"why":"\\u001b\[2J"\}\n$/)
    const { holders } = JSON.parse((await cli('inspect', '--shared', '--json', name)).stdout)
    assert.deepEqual([holders.length, holders[0].fencingToken], [1, String(held.fencingToken)])
    await until('held', () => top.output.stdout.includes('"used":2'))
    assert.equal((await cli('inspect', name)).code, 1)
    assert.equal((await cli('release', '--force', name)).code, 1)
    assert.equal((await cli('release', '--force', '--shared', name)).code, 0)
    assert.equal((await cli('release', '--force', '--shared', name)).code, 1)
    top.child.kill('SIGINT')
    assert.equal((await top.ended).code, 0)
    const lines = top.output.stdout.trim().split('\n')
    assert.deepEqual(JSON.parse(lines[0]), { name, used: 0, limit: null, waiting: 0, holders: [] })
  })

  test('inspect --shared shows readers and a writer', { timeout }, async () => {
    const { read, write } = locks.readWriteLock('sides')
    const shown = async () => (await cli('inspect', '--shared', 'sides')).stdout
    await read.using(async () => {
      assert.match(await shown(), new RegExp(`^sides: held by 1 reader, 0 waiting${table('read')}$`))
      await read.using(async () => assert.match(await shown(), /^sides: held by 2 readers, 0 waiting\n/))
    })
    await write.using(async () =>
      assert.match(await shown(), new RegExp(`^sides: held by a writer, 0 waiting${table('write')}$`)),
    )
  })
})
