// Builds the addon as it is shipped for Linux x64 with glibc: with a profile, optimised across crates, and stripped.
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { buildLibrary, hostTarget, locateProfdata, profile } from '../scripts/pgo.mjs'

/** Builds the addon. Resolves to the path of a copy that Node can load. */
export async function releaseBuild() {
  const hasProfdata = locateProfdata() !== undefined
  if (!hasProfdata)
    console.error('No llvm-profdata: the addon is built without a profile, and is slower than the shipped one.')
  const flags = hasProfdata ? await profile() : ''
  return buildLibrary(hostTarget, join(fileURLToPath(new URL('..', import.meta.url)), 'target', 'pgo'), flags)
}
