// Bad calls to a service. A row has the function, its arguments, the rejected argument, and how the message shows the value.

const fn = () => {
  throw new Error('fn was called')
}
const LONE = 'lone \ud800 surrogate'
const shownLone = '"lone \ufffd surrogate"'
const long = 'n'.repeat(513)
const symbol = 'a symbol, bigint or external'

/** Values that are not a name, and how a message shows them. */
const noText = [
  [undefined, 'undefined'],
  [null, 'null'],
  [42, '42'],
  [NaN, 'NaN'],
  [true, 'true'],
  [{}, 'an object'],
  [Symbol('n'), symbol],
  [10n, symbol],
  [fn, 'a function'],
]
const noName = [
  ['', '""'],
  [long, '513 bytes'],
  ['é'.repeat(257), '514 bytes'],
  ['🔒'.repeat(129), '516 bytes'],
  ['🔒'.repeat(300), '1200 bytes'],
  [LONE, shownLone],
  ['\udc00', '"\ufffd"'],
]
const noSeconds = [
  [null, 'null'],
  ['5', '"5"'],
  ['', '""'],
  [NaN, 'NaN'],
  [Infinity, 'Infinity'],
  [-Infinity, '-Infinity'],
  [0, '0'],
  [-0, '-0'],
  [-1, '-1'],
  [-0.001, '-0.001'],
  [2147483.649, '2147483.649'],
  [true, 'true'],
  [{}, 'an object'],
  [[5], 'an array'],
  [5n, symbol],
  [new Date(0), 'an object'],
]
const noDurations = ['5', '-5s', '5 s', '5d', 's', '5S', '1e3ms', '25d', '0s', '5s5s'].map((text) => [
  text,
  JSON.stringify(text),
])
const noMs = [
  ...noSeconds.filter(([value]) => value !== 2147483.649),
  [2147483649, '2147483649'],
  [fn, 'a function'],
  ...noDurations.filter(([text]) => text !== '5'),
]
const noPositive = noMs.filter(([value]) => !Object.is(value, -0))
const noSpan = noPositive.filter(([value]) => value !== 0 && value !== '0s')
const noWait = [
  [null, 'null'],
  ['5', '"5"'],
  [NaN, 'NaN'],
  [-1, '-1'],
  [-Infinity, '-Infinity'],
  [true, 'true'],
  [{}, 'an object'],
  [5n, symbol],
]
const noFlag = [
  [null, 'null'],
  [0, '0'],
  [1, '1'],
  ['true', '"true"'],
  [{}, 'an object'],
  [fn, 'a function'],
]
const noSignal = [
  [null, 'null'],
  [true, 'true'],
  ['abort', '"abort"'],
  [{}, 'an object'],
  [[], 'an array'],
  [fn, 'a function'],
  [new AbortController(), 'an object'],
  [new EventTarget(), 'an object'],
  [{ aborted: false }, 'an object'],
  [{ aborted: 0, addEventListener: fn, removeEventListener: fn }, 'an object'],
]
const loop = {}
loop.self = loop
const noMetadata = [
  [fn, 'a function'],
  [Symbol('m'), symbol],
  [10n, symbol],
  [loop, 'an object'],
  [{ deep: [10n] }, 'an object'],
  [{ toJSON: () => undefined }, 'an object'],
  ['m'.repeat(16_383), '16385 bytes'],
  ['é'.repeat(8192), '16386 bytes'],
]
const noOptions = [
  [null, 'null'],
  [5, '5'],
  ['text', '"text"'],
  [true, 'true'],
  [[], 'an array'],
  [5n, symbol],
]
const unknown = ['ttl', 'TtlMs', 'ttlSeconds', 'wait', 'timeout', 'retries', 'Signal', '', 'ä']

/** Options of acquire, tryAcquire and using, each with one bad value: [options, argument, shown]. */
const badOptions = [
  ...noOptions.map(([value, shown]) => [value, 'options', shown]),
  ...unknown.map((name) => [{ [name]: 5 }, 'options', JSON.stringify(name)]),
  ...noMs.map(([ttlMs, shown]) => [{ ttlMs }, 'ttlMs', shown]),
  ...noWait.map(([waitMs, shown]) => [{ waitMs }, 'waitMs', shown]),
  ...noFlag.map(([renew, shown]) => [{ renew }, 'renew', shown]),
  ...noPositive.map(([maxHoldMs, shown]) => [{ maxHoldMs }, 'maxHoldMs', shown]),
  ...noPositive.map(([stallLimitMs, shown]) => [{ stallLimitMs }, 'stallLimitMs', shown]),
  ...noSpan.map(([minHoldMs, shown]) => [{ minHoldMs }, 'minHoldMs', shown]),
  ...noSignal.map(([signal, shown]) => [{ signal }, 'signal', shown]),
  ...noMetadata.map(([metadata, shown]) => [{ metadata }, 'metadata', shown]),
]

const badNames = [
  ...noText.map(([value, shown]) => [value, 'names', shown]),
  [[], 'names', '[]'],
  [Array(1001).fill('n'), 'names', '1001'],
  [new Set(['n']), 'names', 'an object'],
  ...noName.flatMap(([value, shown]) => [
    [value, 'name', shown],
    [['fine', value], 'name', shown],
  ]),
  ...noText.map(([value, shown]) => [[value], 'name', shown]),
  [[['nested']], 'name', 'an array'],
  [Object.assign([], { 0: 'a', 2: 'c' }), 'name', 'undefined'],
]

const noFunction = [
  [undefined, 'undefined'],
  [null, 'null'],
  ['fn', '"fn"'],
  [{}, 'an object'],
  [Promise.resolve(), 'an object'],
]

/** Returns the rows: [function, arguments, rejected argument, how its value is shown]. `json` is that of a held lock. */
export function calls(json) {
  const rows = []
  const add = (name, args, argument, shown) => rows.push([name, args, argument, shown])

  for (const [value, shown] of [...noText, ...noName, [['n'], 'an array']]) {
    for (const name of ['acquireLock', 'releaseLock', 'inspect', 'forceRelease']) add(name, [value], 'name', shown)
    if (shown !== 'an object') add('acquireAndExecute', [value, fn], 'name', shown)
    add('acquireAndExecute', [{ name: value }, fn], 'name', shown)
  }
  for (const [value, shown] of noSeconds) {
    add('acquireLock', ['n', value], 'ttlSeconds', shown)
    add('acquireAndExecute', ['n', value, fn], 'ttlSeconds', shown)
    add('acquireAndExecute', [{ name: 'n', ttlSeconds: value }, fn], 'ttlSeconds', shown)
  }
  add('acquireLock', ['n', fn], 'ttlSeconds', 'a function')
  add('acquireAndExecute', ['n', fn, fn], 'ttlSeconds', 'a function')
  add('acquireAndExecute', ['n', fn, 5], 'ttlSeconds', 'a function')

  add('acquireAndExecute', [], 'name', 'undefined')
  add('acquireAndExecute', [fn], 'name', 'a function')
  add('acquireAndExecute', [{}, fn], 'name', 'undefined')
  add('acquireAndExecute', ['n'], 'fn', 'undefined')
  add('acquireAndExecute', ['n', 5], 'fn', 'undefined')
  for (const [value, shown] of noFunction) {
    add('acquireAndExecute', ['n', 5, value], 'fn', shown)
    add('acquireAndExecute', [{ name: 'n' }, value], 'fn', shown)
    add('using', ['n', {}, value], 'fn', shown)
    add('tryUsing', ['n', {}, value], 'fn', shown)
  }
  add('using', ['n'], 'fn', 'undefined')
  add('using', ['n', { ttlMs: 5 }], 'fn', 'undefined')
  add('using', ['n', fn, fn], 'options', 'a function')
  for (const option of ['ttl', 'names']) {
    add('acquireAndExecute', [{ name: 'n', [option]: 5 }, fn], 'options', JSON.stringify(option))
  }
  add('acquireAndExecute', [{ name: 'n', ttlMs: 5000, ttlSeconds: 5 }, fn], 'ttlSeconds', '5')

  for (const [names, argument, shown] of badNames) {
    add('acquire', [names], argument, shown)
    add('tryAcquire', [names], argument, shown)
    add('using', [names, fn], argument, shown)
    add('tryUsing', [names, fn], argument, shown)
  }
  for (const [options, argument, shown] of badOptions) {
    add('acquire', ['n', options], argument, shown)
    add('tryAcquire', ['n', options], argument, shown)
    add('using', ['n', options, fn], argument, shown)
    add('tryUsing', ['n', options, fn], argument, shown)
    const isForAll = argument !== 'options' && shown !== '"ttlSeconds"'
    if (isForAll) add('acquireAndExecute', [{ name: 'n', ...options }, fn], argument, shown)
  }

  for (const [value, shown] of noOptions) {
    add('list', [value], 'options', shown)
    add('close', [value], 'options', shown)
  }
  add('close', [{ drain: 5 }], 'options', '"drain"')
  for (const [drainMs, shown] of noSpan) add('close', [{ drainMs }], 'drainMs', shown)
  add('list', [{ pre: 'n' }], 'options', '"pre"')
  for (const [prefix, shown] of [...noText.slice(1), [['n'], 'an array'], [LONE, shownLone]]) {
    add('list', [{ prefix }], 'prefix', shown)
  }

  for (const [value, shown] of [...noText.filter(([value]) => value?.constructor !== Object), [[], 'an array']]) {
    add('restore', [value], 'transferable', shown)
  }
  for (const text of ['', 'text', '{', '{"names"']) add('restore', [text], 'transferable', 'other text')
  const noJson = [
    ['5', '5'],
    ['null', 'null'],
    ['[]', 'an array'],
    ['"x"', '"x"'],
  ]
  for (const [text, shown] of noJson) add('restore', [text], 'transferable', shown)
  add('restore', [{}], 'transferable', 'no names')
  add('restore', ['{}'], 'transferable', 'no names')
  for (const field of ['names', 'token', 'fencingToken']) {
    add('restore', [{ ...json, [field]: undefined }], 'transferable', `no ${field}`)
  }
  const { token: _, ...logged } = { ...json, isHeld: true, remainingMs: 5 }
  add('restore', [logged], 'transferable', 'the result of lock.toJSON(), which has no owner token')
  add('restore', [{ ...json, more: 1 }], 'transferable', '"more"')
  add('restore', [{ ...json, names: [] }], 'names', '[]')
  add('restore', [{ ...json, names: 5 }], 'names', '5')
  add('restore', [{ ...json, names: [''] }], 'name', '""')
  add('restore', [{ ...json, token: 5 }], 'token', '5')
  add('restore', [{ ...json, fencingToken: 5 }], 'fencingToken', '5')
  add('restore', [{ ...json, fencingToken: 5n }], 'fencingToken', symbol)
  for (const text of ['', 'x', '-1', '1.5', '18446744073709551616', ' 5']) {
    add('restore', [{ ...json, fencingToken: text }], 'fencingToken', JSON.stringify(text))
  }
  for (const [ttlMs, shown] of noMs) add('restore', [{ ...json, ttlMs }], 'ttlMs', shown)
  for (const [renew, shown] of noFlag) add('restore', [{ ...json, renew }], 'renew', shown)
  for (const [metadata, shown] of noMetadata) add('restore', [{ ...json, metadata }], 'metadata', shown)
  return rows
}

/** Arguments that `lock.extend` rejects. */
export const extensions = [[undefined, 'undefined'], ...noMs]

/** Invalid tokens. The message shows what is wrong, but not the token, which is the right to release. */
export const tokens = ['', 'abc', 'g'.repeat(32), 'A'.repeat(32), 'a'.repeat(33), `${'a'.repeat(31)}é`]
