import { fileURLToPath } from 'node:url'

export default {
  output: 'standalone',
  // Node loads the addon: it is traced and copied, and not bundled.
  serverExternalPackages: ['holdfast'],
  // The packages of this app are in the folder above it.
  outputFileTracingRoot: fileURLToPath(new URL('..', import.meta.url)),
}
