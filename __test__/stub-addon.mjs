// An addon without a store, for tests of the benchmark and of the gates.
import { writeFile } from 'node:fs/promises'
import { join } from 'node:path'

/**
 * Writes an addon without a store. `acquire` is the code of its acquisitions, `release` that of its releases, `before` that of the file.
 *
 * @param {string} folder
 * @param {string} name
 * @param {string} acquire
 * @param {{ release?: string, before?: string }} [more]
 */
export async function stubAddon(folder, name, acquire, { release = '', before = '' } = {}) {
  const file = join(folder, `${name}.cjs`)
  const service = `acquire: async () => { ${acquire} }, acquireByName: async () => true, releaseByName: async () => true`
  await writeFile(
    file,
    `${before}
    exports.LockService = class {}
    Object.assign(exports.LockService.prototype, { ${service}, setRunsJobs() {}, stats: () => '{"lost":0}', close: async () => {} })
    exports.connect = async () => new exports.LockService()
    exports.release = async (id) => { ${release}; return 'token 1 1000 true' }
    exports.finish = async () => null
    exports.forget = () => null`,
  )
  return file
}
