// A profile for an optimised build (profile-guided optimisation; rustc's manual, "Profile-guided Optimization"): builds an
// addon that counts, has it do what workload.mjs does against real servers, and gives rustc's option for a build that makes
// use of the counts. Some five minutes.
//
// It needs an `llvm-profdata` of rustc's LLVM or a later one: `rustup component add llvm-tools`, or Debian's `llvm-22` for
// LLVM 22. Functions are known by names that depend on the target, so the profile is good for this one only.
import { execFileSync } from 'node:child_process'
import { copyFileSync, existsSync, mkdirSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { startRedis, startRedisQuorum } from './servers.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))
const LIBRARY = { linux: 'libholdfast.so', darwin: 'libholdfast.dylib', win32: 'holdfast.dll' }[process.platform]
// How long each part of the work goes on. It is done on Redis alone: with work on MongoDB as well, be it a tenth as long, the addon
// is a tenth larger, and a call to MongoDB takes 25 % less of the client's CPU in the place of 17 %.
const PART_MS = 1500

const rustc = Object.fromEntries(
  execFileSync('rustc', ['-vV'], { encoding: 'utf8' })
    .split('\n')
    .map((line) => line.split(': ')),
)

/** The target that is this machine. */
export const hostTarget = rustc.host

/** Where `llvm-profdata` is; nothing where there is none that will do. */
export function locateProfdata() {
  const sysroot = execFileSync('rustc', ['--print', 'sysroot'], { encoding: 'utf8' }).trim()
  const major = parseInt(rustc['LLVM version'])
  const own = join(sysroot, 'lib', 'rustlib', hostTarget, 'bin', 'llvm-profdata')
  return [own, `llvm-profdata-${major}`, 'llvm-profdata'].find((tool) => isAsNew(tool, major))
}

/** Whether a tool of LLVM's is there, and of this version at least. */
export function isAsNew(tool, major) {
  try {
    const [, version] = /LLVM version (\d+)/.exec(execFileSync(tool, ['--version'], { encoding: 'utf8' }))
    return Number(version) >= major
  } catch {
    return false
  }
}

/** Builds the library in release mode for a target; gives the path of a copy of its own that Node loads. */
export function buildLibrary(target, folder, flags) {
  const env = { ...process.env, RUSTFLAGS: [process.env.RUSTFLAGS, flags].filter(Boolean).join(' ') }
  const args = ['build', '--release', '--lib', '--target', target, '--target-dir', folder]
  execFileSync('cargo', args, { cwd: root, stdio: 'inherit', env })
  const addon = join(mkdtempSync(join(tmpdir(), 'holdfast-build-')), 'holdfast.node')
  copyFileSync(join(folder, target, 'release', LIBRARY), addon)
  return addon
}

/** Makes the profile anew, and gives the option for rustc. */
export async function profile(target = hostTarget) {
  const profdata = locateProfdata()
  if (!profdata) {
    throw new Error('no llvm-profdata for this rustc: `rustup component add llvm-tools`, or a package such as Debian’s llvm-22')
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
  if (!existsSync(counts)) throw new Error('the addon that counts left no counts')
  execFileSync(profdata, ['merge', '-o', merged, counts], { stdio: 'inherit' })
  return `-Cprofile-use=${merged}`
}
