// The addon as it is shipped for this machine's kind, where that is Linux x64 with glibc: optimised across crates after a profile,
// and stripped.
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { buildLibrary, hostTarget, locateProfdata, profile } from '../scripts/pgo.mjs'

/** Builds it, and gives the path of a copy that Node loads. */
export async function releaseBuild() {
  const known = locateProfdata() !== undefined
  if (!known) console.error('No llvm-profdata: the addon is built without a profile, and slower than the one that is shipped.')
  const flags = known ? await profile() : ''
  return buildLibrary(hostTarget, join(fileURLToPath(new URL('..', import.meta.url)), 'target', 'pgo'), flags)
}
