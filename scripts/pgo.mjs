// Creates a profile for an optimised build (rustc's manual, "Profile-guided Optimization"): builds an instrumented addon, runs
// workload.mjs with it against real servers, and returns rustc's option for a build with this profile. Takes some five minutes.
//
// Needs an `llvm-profdata` of rustc's LLVM or a later one: `rustup component add llvm-tools`, or Debian's `llvm-22` for LLVM 22.
// The names of functions depend on the target, so a profile is valid for one target only.
import { execFileSync } from 'node:child_process'
import { copyFileSync, existsSync, mkdirSync, mkdtempSync, rmSync, statSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { basename, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { startRedis } from './servers.mjs'
import { requireRust } from './setup.mjs'
import { startRedisQuorum } from './topologies.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))
/** @type {Partial<Record<NodeJS.Platform, string>>} */
const LIBRARIES = { darwin: 'libholdfast.dylib', win32: 'holdfast.dll' }
const LIBRARY = LIBRARIES[process.platform] ?? 'libholdfast.so'
// The duration of each part of the workload. It uses Redis only: with a workload on MongoDB of a tenth of this duration, the addon
// is a tenth larger, and a call to MongoDB saves 25 % of the client's CPU instead of 17 %. With PostgreSQL it is 0.2 MiB larger, and a call
// saves another 5 %.
const PART_MS = 1500
/** The maximum size of an addon with a profile, in MiB. Without a profile an addon is about 1 MiB larger. */
const LARGEST_MIB = 14.2

requireRust()
const rustc = Object.fromEntries(
  execFileSync('rustc', ['-vV'], { encoding: 'utf8' })
    .split('\n')
    .map((line) => line.split(': ')),
)

/** The target of this machine. */
export const hostTarget = rustc.host

/** Returns the path of an `llvm-profdata` that is as new as rustc's LLVM, or `undefined`. */
export function locateProfdata() {
  const sysroot = execFileSync('rustc', ['--print', 'sysroot'], { encoding: 'utf8' }).trim()
  const major = parseInt(rustc['LLVM version'])
  const own = join(sysroot, 'lib', 'rustlib', hostTarget, 'bin', 'llvm-profdata')
  return [own, `llvm-profdata-${major}`, 'llvm-profdata'].find((tool) => isAsNew(tool, major))
}

/**
 * Returns whether a tool of LLVM exists and has at least this major version.
 *
 * @param {string} tool
 * @param {number} major
 */
function isAsNew(tool, major) {
  try {
    const version = /LLVM version (\d+)/.exec(execFileSync(tool, ['--version'], { encoding: 'utf8' }))?.[1]
    return Number(version) >= major
  } catch {
    return false
  }
}

/**
 * Builds the library in release mode for a target, and compiles `lib/`. Returns the path of a new copy of the library that Node can load.
 *
 * @param {string} target
 * @param {string} folder
 * @param {string} flags
 */
export function buildLibrary(target, folder, flags) {
  const env = { ...process.env, RUSTFLAGS: [process.env.RUSTFLAGS, flags].filter(Boolean).join(' ') }
  const args = ['build', '--release', '--lib', '--target', target, '--target-dir', folder]
  execFileSync('cargo', args, { cwd: root, stdio: 'inherit', env })
  execFileSync(process.execPath, ['scripts/build.mjs', '--ts'], { cwd: root, stdio: 'inherit' })
  const addon = join(mkdtempSync(join(tmpdir(), 'holdfast-build-')), 'holdfast.node')
  copyFileSync(join(folder, target, 'release', LIBRARY), addon)
  return addon
}

/**
 * Throws if an addon that was built with a profile is too large.
 *
 * @param {string} path
 */
export function checkSize(path) {
  const mib = statSync(path).size / 2 ** 20
  if (mib > LARGEST_MIB)
    throw new Error(
      `${basename(path)} has ${mib.toFixed(2)} MiB; with a profile it must have at most ${LARGEST_MIB} MiB: make it smaller, or change LARGEST_MIB in scripts/pgo.mjs`,
    )
}

/** Creates the profile. Returns the option for rustc. */
export async function profile(target = hostTarget) {
  const profdata = locateProfdata()
  if (!profdata) {
    throw new Error(
      'no llvm-profdata for this rustc: `rustup component add llvm-tools`, or a package such as Debian’s llvm-22',
    )
  }
  const folder = join(root, 'target', 'pgo')
  const [counts, merged] = [join(folder, 'counts'), join(folder, 'holdfast.profdata')]
  mkdirSync(folder, { recursive: true })
  rmSync(counts, { recursive: true, force: true })
  const addon = buildLibrary(target, folder, `-Cprofile-generate=${counts}`)
  const servers = await Promise.all([startRedis(), startRedisQuorum()])
  try {
    const work = servers.map(({ url }) => `${PART_MS}:${url}`)
    const env = { ...process.env, NAPI_RS_NATIVE_LIBRARY_PATH: addon }
    execFileSync(process.execPath, [join(root, 'scripts', 'workload.mjs'), ...work], { stdio: 'inherit', env })
  } finally {
    await Promise.all(servers.map((server) => server.stop()))
  }
  if (!existsSync(counts)) throw new Error('the instrumented addon wrote no profile')
  execFileSync(profdata, ['merge', '-o', merged, counts], { stdio: 'inherit' })
  return `-Cprofile-use=${merged}`
}
