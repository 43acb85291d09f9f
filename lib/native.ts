import { existsSync } from 'node:fs'
import { join } from 'node:path'

// The types come from the build, the functions from the addon.
import type * as Native from './addon.js'

/** @internal */
export type NativeService = Native.LockService
/** @internal */
export type { AcquireRecord, Config } from './addon.js'

// One `require` per platform with a literal name, so that a bundler finds the addon.
const ADDONS: Record<string, () => typeof Native> = {
  'linux-x64-gnu': () => require('holdfast-linux-x64-gnu'),
  'linux-x64-musl': () => require('holdfast-linux-x64-musl'),
  'linux-arm64-gnu': () => require('holdfast-linux-arm64-gnu'),
  'linux-arm64-musl': () => require('holdfast-linux-arm64-musl'),
  'darwin-x64': () => require('holdfast-darwin-x64'),
  'darwin-arm64': () => require('holdfast-darwin-arm64'),
  'win32-x64-msvc': () => require('holdfast-win32-x64-msvc'),
}

function open(path: string): typeof Native {
  const opened = { exports: {} as typeof Native }
  process.dlopen(opened, path)
  return opened.exports
}

function load(): typeof Native {
  const given = process.env['NAPI_RS_NATIVE_LIBRARY_PATH']
  if (given) return open(given)
  const platform = `${process.platform}-${process.arch}`
  let cause: unknown
  // On Linux, the package for glibc does not load where the C library is musl.
  for (const target of Object.keys(ADDONS).filter((target) => target.startsWith(platform))) {
    try {
      const built = join(__dirname, '..', `holdfast.${target}.node`)
      return existsSync(built) ? open(built) : ADDONS[target]!()
    } catch (error) {
      cause ??= error
    }
  }
  throw new Error(
    `holdfast has no native addon for ${platform} here: install it with its optional dependencies ` +
      '(npm install holdfast --include=optional), or build it from a checkout with `npm run build`, which needs Rust.',
    { cause },
  )
}

/** @internal */
export const native = load()
