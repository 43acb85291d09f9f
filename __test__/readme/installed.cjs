// The package `holdfast` in the node_modules of a test project: replaces the servers of the README's examples by the test
// servers, or by `memory:` where there are none.
const { randomBytes } = require('node:crypto')
const { isLockError, Lock, LockError, LockService } = require(`${process.env.README_ROOT}/index.js`)

// A separate database needs no prefix: its documents are the same as a reader's.
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
