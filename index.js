'use strict'

// The loader that the build generates (native.js) looks for the addon beside it, then for the platform's own package.
let native
try {
  native = require('./native.js')
} catch (cause) {
  const platform = `${process.platform}-${process.arch}`
  throw new Error(
    `holdfast has no native addon for ${platform} here: install it with its optional dependencies ` +
      '(npm install holdfast --include=optional), or build it from a checkout with `npm run build`, which needs Rust.',
    { cause },
  )
}

module.exports.Lock = native.Lock
module.exports.LockService = native.LockService
