// holdfast as its users install it: in a folder `node_modules`, and as tarballs for package managers.
import { execFile } from 'node:child_process'
import { cpSync, existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const root = fileURLToPath(new URL('../..', import.meta.url))
const run = promisify(execFile)

/** Returns the file name of this machine's addon; `undefined` if it is not built. */
export const addonOf = () =>
  readdirSync(root).find(
    (file) => file.startsWith(`holdfast.${process.platform}-${process.arch}`) && file.endsWith('.node'),
  )

/**
 * Copies what npm would install into the folder `modules`. Returns the name of the platform package.
 *
 * @param {string} modules
 */
export function install(modules) {
  const addon = addonOf()
  if (!addon) throw new Error('there is no addon of this machine: run npm run build:debug')
  const target = join(modules, 'holdfast')
  rmSync(target, { recursive: true, force: true })
  const { files } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'))
  for (const file of ['package.json', ...files])
    if (existsSync(join(root, file))) cpSync(join(root, file), join(target, file), { recursive: true })
  const platform = addon.split('.')[1]
  const own = join(modules, `holdfast-${platform}`)
  rmSync(own, { recursive: true, force: true })
  mkdirSync(own, { recursive: true })
  cpSync(join(root, 'npm', platform, 'package.json'), join(own, 'package.json'))
  cpSync(join(root, addon), join(own, addon))
  return `holdfast-${platform}`
}

/**
 * Packs holdfast and its platform package, as a release publishes them. Returns the paths of both tarballs by name.
 *
 * @param {string} folder
 */
export async function pack(folder) {
  const platform = install(folder)
  const file = join(folder, 'holdfast', 'package.json')
  const own = JSON.parse(readFileSync(file, 'utf8'))
  writeFileSync(file, JSON.stringify({ ...own, optionalDependencies: { [platform]: own.version } }))
  for (const name of ['holdfast', platform])
    await run('npm', ['pack', '--pack-destination', folder], { cwd: join(folder, name) })
  return Object.fromEntries(['holdfast', platform].map((name) => [name, join(folder, `${name}-${own.version}.tgz`)]))
}
