'use strict'

// The build bundles `lib/` to `dist/index.js`. Each name is exported by itself, so that an ES module can import it.
const surface = require('./dist/index.js')

module.exports.Election = surface.Election
module.exports.isLockError = surface.isLockError
module.exports.Lock = surface.Lock
module.exports.LockError = surface.LockError
module.exports.LockService = surface.LockService
