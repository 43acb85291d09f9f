// The package `holdfast` in the node_modules of a test project: replaces the servers of the documents' examples by the test
// servers, or by `memory:` where there are none, and the embedded store by a file of the project. An example keeps its URL if that is the
// URL of a test server of SQL.
const { randomBytes } = require('node:crypto')
const { isLockError, Lock, LockError, LockService } = require(`${process.env.README_ROOT}/index.js`)

// A separate database needs no prefix: its documents are the same as a reader's.
const own = process.env.README_MONGODB_URL
const SERVERS = { redis: process.env.HOLDFAST_TEST_REDIS_URL, mongodb: own ?? process.env.HOLDFAST_TEST_MONGODB_URL }
const SQL_SERVERS = [process.env.HOLDFAST_TEST_POSTGRES_URL, process.env.HOLDFAST_TEST_MYSQL_URL]
const isSqlServer = (target) => SQL_SERVERS.some((url) => url && new URL(url).host === new URL(target).host)
const options = own ? {} : { keyPrefix: `readme:${randomBytes(6).toString('hex')}:` }
const embedded = `sqlite:${__dirname}/locks.sqlite`

exports.isLockError = isLockError
exports.Lock = Lock
exports.LockError = LockError
exports.LockService = {
  connect(...args) {
    const [target, given] = args
    // A target that is present but empty is an error.
    if (args.length > 0 && !target) return LockService.connect(...args)
    if (args.length === 0) return LockService.connect(embedded)
    const nodes = process.env.HOLDFAST_TEST_REDIS_QUORUM_URLS?.split(',')
    if (Array.isArray(target)) return nodes ? LockService.connect(nodes, { ...options, ...given }) : memory(given)
    if (typeof target === 'object') {
      // The address and the credentials of a server without a URL.
      const { host, port, database, username, password, credentials, tls, ...more } = target
      return SERVERS.redis ? LockService.connect(SERVERS.redis, { ...options, ...more }) : memory(more)
    }
    if (/^(postgres|mysql):/.test(target) && isSqlServer(target)) return LockService.connect(target, given)
    const server = SERVERS[/^(\w+):/.exec(target)?.[1]]
    return server ? LockService.connect(server, { ...options, ...given }) : memory(given)
  },
}

const memory = (given) => LockService.connect('memory:readme', given)
