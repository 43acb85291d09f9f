// Finds the programs of servers, and the account that runs them.
import { execFile } from 'node:child_process'
import { access, constants, realpath, stat } from 'node:fs/promises'
import { basename, delimiter, dirname, join, resolve } from 'node:path'
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
 * Returns the folder on the way to a program that a user may not enter, the one nearest to the program. `undefined`: there is none.
 *
 * @param {string} path
 * @param {{ uid: number, gid: number }} user
 */
async function closedFolder(path, { uid, gid }) {
  // Behind a link there are other folders.
  for (const target of [resolve(path), await realpath(path)]) {
    for (let at = target; at !== dirname(at); at = dirname(at)) {
      const folder = await stat(dirname(at))
      const permission = folder.uid === uid ? 0o100 : folder.gid === gid ? 0o010 : 0o001
      if ((folder.mode & permission) === 0) return dirname(at)
    }
  }
}

/**
 * Returns the account that runs a server which refuses to run as root. `undefined`: this process's. Throws if this account may not enter
 * a folder on the way to the program.
 *
 * @param {string} preferred
 * @param {string} program
 */
export async function account(preferred, program) {
  if (process.getuid?.() !== 0) return undefined
  /** @param {string} name */
  const ids = async (name) => {
    const [uid, gid] = await Promise.all(
      ['-u', '-g'].map(async (flag) => Number((await promisify(execFile)('id', [flag, name])).stdout)),
    )
    return { uid, gid }
  }
  const user = await ids(preferred).catch(() => ids('nobody'))
  const folder = await closedFolder(program, user)
  if (folder !== undefined) {
    const remedy = `chmod 711 ${folder}`
    throw new Error(`${folder} is closed to other users, and ${basename(program)} does not run as root: ${remedy}`)
  }
  return user
}
