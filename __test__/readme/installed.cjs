// Stands in a project's node_modules as `holdfast`: the package itself, but the servers of the README's examples are
// the tests' own, or `memory:` where there are none.
const { randomBytes } = require('node:crypto')
const { isLockError, Lock, LockError, LockService } = require(`${process.env.README_ROOT}/index.js`)

// A database for this run alone needs no prefix, and the documents there are as a reader's.
const own = process.env.README_MONGODB_URL
const SERVERS = { redis: process.env.HOLDFAST_TEST_REDIS_URL, mongodb: own ?? process.env.HOLDFAST_TEST_MONGODB_URL }
const options = own ? {} : { keyPrefix: `readme:${randomBytes(6).toString('hex')}:` }

exports.isLockError = isLockError
exports.Lock = Lock
exports.LockError = LockError
exports.LockService = {
  connect(target, given) {
    const nodes = process.env.HOLDFAST_TEST_REDIS_QUORUM_URLS?.split(',')
    const server = Array.isArray(target) ? nodes : SERVERS[/^(\w+):/.exec(target)?.[1]]
    return server ? LockService.connect(server, { ...options, ...given }) : LockService.connect('memory:readme', given)
  },
}
