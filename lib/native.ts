import { existsSync } from 'node:fs'
import { createRequire } from 'node:module'
import { join } from 'node:path'

// The build writes the types; the functions come from the addon.
import type * as Native from './addon.js'

/** @internal */
export type NativeService = Native.LockService
/** @internal */
export type { AcquireRecord, Config } from './addon.js'

// For bundlers: one `require` per platform with a literal path. The build writes the folder. Its `main` is the addon in the package
// of the platform. Without that package, a bundler uses the empty `index.js` of the folder, without a warning.
const BUNDLED: Record<string, () => Partial<typeof Native>> = {
  'linux-x64-gnu': () => require('./addons/linux-x64-gnu'),
  'linux-x64-musl': () => require('./addons/linux-x64-musl'),
  'linux-arm64-gnu': () => require('./addons/linux-arm64-gnu'),
  'linux-arm64-musl': () => require('./addons/linux-arm64-musl'),
  'darwin-x64': () => require('./addons/darwin-x64'),
  'darwin-arm64': () => require('./addons/darwin-arm64'),
  'win32-x64-msvc': () => require('./addons/win32-x64-msvc'),
}

// Bundlers do not follow this `require`.
const open = createRequire(__filename) as (id: string) => typeof Native

function load(): typeof Native {
  const override = process.env['NAPI_RS_NATIVE_LIBRARY_PATH']
  if (override) return open(override)
  const platform = `${process.platform}-${process.arch}`
  const failures: any[] = []
  // On Linux with musl, the addon for glibc is tried first, and does not load.
  for (const target of Object.keys(BUNDLED).filter((target) => target.startsWith(platform))) {
    try {
      const built = join(__dirname, '..', `holdfast.${target}.node`)
      if (existsSync(built)) return open(built)
      // A bundle has no such folder.
      const bundled = existsSync(join(__dirname, 'addons')) ? {} : BUNDLED[target]!()
      if (bundled.connect) return bundled as typeof Native
      // By its file: a traced copy (Next.js, @vercel/nft) has the addon without its package.json.
      return open(`holdfast-${target}/holdfast.${target}.node`)
    } catch (error) {
      failures.push(error)
    }
  }
  const install = 'with its optional dependencies (npm install holdfast --include=optional)'
  // An addon that exists reports why it does not load. On Linux the package of the other C library is usually not installed.
  const broken = failures.filter((failure) => !String(failure?.code).endsWith('MODULE_NOT_FOUND'))
  if (broken.length === 0) {
    const build = 'or build it from a checkout with `npm run build`, which needs Rust'
    throw new Error(`holdfast has no native addon for ${platform} here: install it ${install}, ${build}.`, {
      cause: failures[0],
    })
  }
  const reasons = broken.map((failure) => String(failure?.message).trim()).join('; ')
  throw new Error(
    `the native addon of holdfast does not load (${reasons}): install it again on this system, ${install}.`,
    {
      cause: broken[0],
    },
  )
}

/** @internal */
export const native = load()
