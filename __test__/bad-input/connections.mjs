// Bad calls to LockService.connect: [arguments, rejected argument, pattern of the message].
const PASSWORD = 'hunter2'
const RULE = /memory:.*redis:\/\/.*mongodb:\/\//
const symbol = /got a symbol, bigint or external$/
const shown = (value) => new RegExp(`got ${value.replaceAll(/[\\^$.*+?()[\]{}|]/g, '\\$&')}$`)

const unknown = ['http', 'mssql', 'consul', 'gopher', 'redis+quorum', 'Redis', 'mongo', 'file']
const schemes = unknown.map((scheme) => [
  [`${scheme}://user:${PASSWORD}@host/db`],
  'target',
  new RegExp(`${RULE.source}.*"${scheme.replace('+', '\\+')}:"`),
])

const noTargets = [
  [undefined, 'undefined'],
  [null, 'null'],
  ['', '""'],
  [5, '5'],
  [NaN, 'NaN'],
  [true, 'true'],
  [false, 'false'],
  [() => {}, 'a function'],
].map(([target, text]) => [[target], 'target', shown(text)])

const redis = [
  'redis:',
  'redis://',
  `redis:${PASSWORD}`,
  `redis:///${PASSWORD}`,
  `redis://:${PASSWORD}@`,
  `redis://host:${PASSWORD}`,
  `redis://user:a#${PASSWORD}@host`,
  `redis://user:a/${PASSWORD}@host`,
  `redis://user:a?${PASSWORD}@host`,
  `redis://host/${PASSWORD}`,
  `redis://host/1/${PASSWORD}`,
  'redis://host/-1',
  'redis://host/99999999999',
  `redis://host?${PASSWORD}=1`,
  `redis://host#${PASSWORD}`,
  'redis://host:99999',
  'redis://host:0x1',
  `rediss://no host:${PASSWORD}@h h`,
].map((url) => [[url], 'target', /redis:\/\//])

const sentinel = [
  'redis+sentinel:',
  'redis+sentinel://',
  `redis+sentinel://${PASSWORD}`,
  'redis+sentinel://h1,h2',
  'redis+sentinel://h1,,h2/m',
  `redis+sentinel://h:${PASSWORD}/m`,
  `redis+sentinel://user:a#${PASSWORD}@h/m`,
  `redis+sentinel://user:a/${PASSWORD}@h/m`,
  `redis+sentinel://user/${PASSWORD}@h`,
  `redis+sentinel://user:a?${PASSWORD}@h/m`,
  `redis+sentinel://h/m/${PASSWORD}`,
  `redis+sentinel://h/m?${PASSWORD}=1&x=y@z`,
  `rediss+sentinel://h/m?sentinelTls=${PASSWORD}`,
  `redis+sentinel://h/m#${PASSWORD}`,
].map((url) => [[url], 'target', /redis\+sentinel:\/\//])

const cluster = [
  'redis+cluster:',
  'redis+cluster://',
  'redis+cluster://h1,,h2',
  'redis+cluster://h/1',
  `redis+cluster://h1,h2/${PASSWORD}`,
  `redis+cluster://h:${PASSWORD}`,
  `redis+cluster://user:a/${PASSWORD}@h`,
  `redis+cluster://user:a#${PASSWORD}@h`,
  `redis+cluster://h?${PASSWORD}=1`,
].map((url) => [[url], 'target', /redis\+cluster:\/\//])

const mongodb = [
  'mongodb:',
  'mongodb://',
  `mongodb:${PASSWORD}`,
  `mongodb://user:${PASSWORD}@`,
  `mongodb://user:${PASSWORD}`,
  `mongodb://us@er:${PASSWORD}@host`,
  `mongodb://user:a/${PASSWORD}@host`,
  `mongodb://user:a%${PASSWORD}@host`,
  'mongodb://host:0',
  'mongodb://host:99999',
  'mongodb://host:port',
  'mongodb://host/?nonsense=1',
  'mongodb://host/?w=0',
  `mongodb://user:${PASSWORD}@host/?replicaSet`,
  `mongodb://user:${PASSWORD}@host/?tls=maybe`,
  'mongodb+srv://host:27017',
].map((url) => [[url], 'target', /./])

const postgres = [
  'postgres:',
  'postgres://user@',
  `postgres:${PASSWORD}`,
  `postgres://user:${PASSWORD}`,
  `postgres://user:${PASSWORD}@`,
  `postgres://user:${PASSWORD}@a,,b/db`,
  `postgresql://user:${PASSWORD}@host:port/db`,
  `postgres://user:1?${PASSWORD}=1&x=y@host/db`,
  `postgres://user:1?host=${PASSWORD}@host/db`,
  `postgres://host/db?sslmode=${PASSWORD}`,
  `postgres://host/db?pooler=${PASSWORD}`,
  'postgres://a,b/db?port=1,2,3',
  'postgres://a,b/db?target_session_attrs=standby',
].map((url) => [[url], 'target', /must be postgres:\/\//])

const mysql = [
  'mysql:',
  'mysql://',
  'mysql:///db',
  'mysql://user:%ff@host',
  'mysql://host?charset=utf8mb4',
  `mariadb://user:${PASSWORD}@host:port/db`,
  `mysql://user:1?${PASSWORD}=1&x=y@host/db`,
  `mysql://host?ssl-mode=${PASSWORD}`,
].map((url) => [[url], 'target', /must be mysql:\/\//])

const etcd = [
  'etcd:',
  'etcd://',
  'etcd:host',
  'etcd://a,,b',
  'etcd://host/path',
  'etcd://host:port',
  'etcd://user:%ff@host',
  `etcds://user:${PASSWORD}@host?timeout=1`,
  `etcd://user:1?${PASSWORD}=1&x=y@host`,
  `etcd://${PASSWORD}@host`,
].map((url) => [[url], 'target', /must be like etcd:\/\//])

const sqlite = [
  'sqlite:',
  'sqlite://',
  'sqlite:/tmp/',
  'sqlite:a?mode=ro',
  'sqlite:a%00b',
  'sqlite:a%ff',
  'sqlite::memory:',
].map((url) => [[url], 'target', /./])

const noText = [
  [null, 'null'],
  [5, '5'],
  [true, 'true'],
  [{}, 'an object'],
  [[], 'an array'],
  ['\ud800', '"\ufffd"'],
]
const noWaits = [
  [null, 'null'],
  ['5', '"5"'],
  [NaN, 'NaN'],
  [-1, '-1'],
]
const noSpans = [...noWaits, [Infinity, 'Infinity'], [2 ** 32, '4294967296']]
const noLimits = [...noSpans, [0, '0']]
const noCounts = [...noWaits, [Infinity, 'Infinity'], [0.5, '0.5'], [101, '101']]
const noFlags = [
  [null, 'null'],
  [1, '1'],
  ['yes', '"yes"'],
]
const noFunctions = [
  [null, 'null'],
  [true, 'true'],
  [{}, 'an object'],
  ['x', '"x"'],
]

const option = (name, value, text) => [['memory:', { [name]: value }], name, shown(text)]
const defaults = (name, values) =>
  values.map(([value, text]) => [['memory:', { defaults: { [name]: value } }], name, shown(text)])

const options = [
  ...[
    [null, 'null'],
    [5, '5'],
    ['x', '"x"'],
    [[], 'an array'],
    [() => {}, 'a function'],
  ].map(([value, text]) => [['memory:', value], 'options', shown(text)]),
  ...['prefix', 'keyprefix', 'timeout', 'url', 'ttlMs', ''].map((name) => [
    ['memory:', { [name]: 'x' }],
    'options',
    shown(JSON.stringify(name)),
  ]),
  ...['uri', 'target', 'ttlMs'].map((name) => [[{ [name]: 'memory:' }], 'target', shown(`"${name}"`)]),
  [[{ url: 'memory:' }, {}], 'options', /must be absent.*got an object$/],
  [[{ url: undefined }], 'url', /HOLDFAST_URL.*got undefined$/],
  [[{ url: null, keyPrefix: 'p' }], 'url', /HOLDFAST_URL.*got null$/],
  [[{ url: '' }], 'url', /HOLDFAST_URL.*got ""$/],
  [[undefined, { keyPrefix: 'p' }], 'target', /HOLDFAST_URL.*got undefined$/],
  [[{ url: [] }], 'target', shown('[]')],
  ...['keyPrefix', 'collection', 'table', 'listenUrl'].flatMap((name) =>
    noText.map(([value, text]) => option(name, value, text)),
  ),
  ...['redis://h', 'sqlite:/tmp/never.sqlite', 'postgres://h', 'mysql://h'].map((url) => [
    [url, { collection: 'mine' }],
    'collection',
    /must be absent for a store other than MongoDB .*got "mine"$/,
  ]),
  ...['redis://h', 'mongodb://h', ['redis://a', 'redis://b', 'redis://c']].map((url) => [
    [url, { table: 'mine' }],
    'table',
    /must be absent for a store other than SQLite, .*got "mine"$/,
  ]),
  option('collection', '', '""'),
  option('table', '', '""'),
  ...noLimits.map(([value, text]) => option('storeTimeoutMs', value, text)),
  ...noCounts.map(([value, text]) => [['redis://host', { minReplicas: value }], 'minReplicas', shown(text)]),
  ...[...noCounts, [0, '0']].map(([value, text]) => [
    ['postgres://host', { maxConnections: value }],
    'maxConnections',
    shown(text),
  ]),
  ...['sqlite:/tmp/never.sqlite', 'mongodb://host', 'redis://host'].map((url) => [
    [url, { maxConnections: 1 }],
    'maxConnections',
    /for a store other than PostgreSQL, MySQL and MariaDB .*got 1$/,
  ]),
  ...[
    'memory:',
    'sqlite:/tmp/never.sqlite',
    'mongodb://host',
    'redis+cluster://host',
    ['redis://a', 'redis://b', 'redis://c'],
  ].map((url) => [[url, { minReplicas: 1 }], 'minReplicas', /for a store other than one of redis:\/\/.*got 1$/]),
  ...[
    [null, 'null'],
    [5, '5'],
    [[], 'an array'],
  ].map(([value, text]) => option('defaults', value, text)),
  ...['ttl', 'signal', 'metadata', 'ttlSeconds'].map((name) => [
    ['memory:', { defaults: { [name]: 5 } }],
    'defaults',
    shown(`"${name}"`),
  ]),
  ...['ttlMs', 'maxHoldMs', 'stallLimitMs'].flatMap((name) => defaults(name, noLimits)),
  ...defaults('minHoldMs', noSpans),
  ...defaults('waitMs', noWaits),
  ...defaults('renew', noFlags),
  ...[
    [null, 'null'],
    [true, 'true'],
    ['file', '"file"'],
  ].map(([value, text]) => option('tls', value, text)),
  [['memory:', { tls: { rejectUnauthorized: false } }], 'tls', shown('"rejectUnauthorized"')],
  ...['caFile', 'certFile', 'keyFile'].map((name) => [['memory:', { tls: { [name]: 5 } }], `tls.${name}`, shown('5')]),
  [['memory:', { tls: { insecure: 1 } }], 'tls.insecure', shown('1')],
  ...noFunctions.map(([value, text]) => option('onEvent', value, text)),
  [['sqlite:/tmp/never.sqlite', { table: 'two words' }], 'table', shown('"two words"')],
  [['sqlite:/tmp/never.sqlite', { table: '1st' }], 'table', shown('"1st"')],
  [['mongodb://host', { collection: 'a$b' }], 'collection', shown('"a$b"')],
  [['mongodb://host', { collection: 'system.locks' }], 'collection', shown('"system.locks"')],
  [['redis://host', { tls: { insecure: true } }], 'target', /rediss:\/\//],
  [['redis+sentinel://host/m', { tls: { insecure: true } }], 'target', /rediss\+/],
  [['rediss://host', { tls: { caFile: '/does/not/exist.pem' } }], 'tls.caFile', /\/does\/not\/exist\.pem/],
  [['mongodb://host', { tls: { keyFile: '/does/not/exist.pem' } }], 'tls.keyFile', /\/does\/not\/exist\.pem/],
]

export const secret = PASSWORD

export const connections = [
  ...schemes,
  ...noTargets,
  ...redis,
  ...sentinel,
  ...cluster,
  ...mongodb,
  ...postgres,
  ...mysql,
  ...etcd,
  ...sqlite,
  [[Symbol('t')], 'target', symbol],
  [[5n], 'target', symbol],
  [[''], 'target', /HOLDFAST_URL/],
  [['redis'], 'target', /redis:\/\//],
  [[PASSWORD], 'target', RULE],
  [['host:6379'], 'target', /did you mean redis:\/\/HOST:PORT\?/],
  [['\ud800'], 'target', shown('"\ufffd"')],
  [[[]], 'target', shown('[]')],
  [[[5]], 'target', shown('5')],
  [[[null]], 'target', shown('null')],
  [[['memory:', 'memory:']], 'target', /"memory:"/],
  [[['redis://one', `mongodb://:${PASSWORD}@two`, 'redis://three']], 'target', /"mongodb:"/],
  [[['redis://one', PASSWORD, 'redis://three']], 'target', /without a scheme/],
  [[[`redis://:${PASSWORD}@one`, `redis://:${PASSWORD}@two`]], 'target', shown('2 URLs')],
  [[[`redis://:${PASSWORD}@one`, 'redis://two', 'redis://ONE:6379/1']], 'target', /URL 1 again as URL 3/],
  // These are not options. As an empty set of options they would select another store than the intended one.
  [[{ href: 5 }], 'target', /./],
  [[Promise.resolve('memory:')], 'target', /./],
  [[new Map([['url', 'memory:']])], 'target', /./],
  [[new URL(`gopher://user:${PASSWORD}@host`)], 'target', new RegExp(`${RULE.source}.*"gopher:"`)],
  [[new URL(`redis://host/${PASSWORD}`)], 'target', /redis:\/\//],
  [[new String('memory:')], 'target', /./],
  ...options,
]
