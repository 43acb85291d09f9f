// The addon as it is shipped: optimised across crates, and stripped.
import { execFileSync } from 'node:child_process'
import { copyFileSync, mkdtempSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

const root = fileURLToPath(new URL('..', import.meta.url))
const LIBRARY = { linux: 'libholdfast.so', darwin: 'libholdfast.dylib', win32: 'holdfast.dll' }

/** Builds it, and gives the path of a copy that Node loads. */
export function releaseBuild() {
  execFileSync('cargo', ['build', '--release', '--lib'], { cwd: root, stdio: 'inherit' })
  const addon = join(mkdtempSync(join(tmpdir(), 'holdfast-bench-')), 'holdfast.node')
  copyFileSync(join(root, 'target', 'release', LIBRARY[process.platform]), addon)
  return addon
}
