// Finds the programs of servers, and the account that runs them.
import { execFile } from 'node:child_process'
import { access, constants } from 'node:fs/promises'
import { delimiter, join } from 'node:path'
import { promisify } from 'node:util'

/** @param {string} path */
export const isRunnable = (path) =>
  access(path, constants.X_OK).then(
    () => true,
    () => false,
  )

/**
 * Finds a program on the PATH, or in other folders. Resolves to its path.
 *
 * @param {string} name
 * @param {string[]} folders
 */
export async function findProgram(name, folders) {
  for (const folder of [...(process.env.PATH ?? '').split(delimiter).filter(Boolean), ...folders]) {
    const path = join(folder, name)
    if (await isRunnable(path)) return path
  }
}

/**
 * Returns the account that runs a server which refuses to run as root. `undefined`: this process's.
 *
 * @param {string} preferred
 */
export async function account(preferred) {
  if (process.getuid?.() !== 0) return undefined
  /** @param {string} name */
  const ids = async (name) => {
    const [uid, gid] = await Promise.all(
      ['-u', '-g'].map(async (flag) => Number((await promisify(execFile)('id', [flag, name])).stdout)),
    )
    return { uid, gid }
  }
  return ids(preferred).catch(() => ids('nobody'))
}
