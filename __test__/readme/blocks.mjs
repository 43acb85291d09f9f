// The fenced blocks of a Markdown file, and the parts of its tables that tests compare with the code.
import { readFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

export const root = fileURLToPath(new URL('../..', import.meta.url))
export const read = (path) => readFileSync(new URL(`../../${path}`, import.meta.url), 'utf8')

/** Every block: its language, its text, and the line where it begins. Throws on a fence that is not understood. */
export function blocksOf(path) {
  const blocks = []
  let open
  read(path)
    .split('\n')
    .forEach((text, index) => {
      if (!/^\s*(```|~~~)/.test(text)) return open?.lines.push(text)
      const fence = text.match(/^```([\w-]*)$/)
      if (!fence) throw new Error(`${path}:${index + 1}: a fence that no test understands: ${text}`)
      if (open && fence[1]) throw new Error(`${path}:${index + 1}: a fence within a fence`)
      if (!open) return (open = { language: fence[1], line: index + 1, lines: [] })
      blocks.push({ language: open.language, line: open.line, code: `${open.lines.join('\n')}\n` })
      open = undefined
    })
  if (open) throw new Error(`${path}:${open.line}: a fence that does not end`)
  return blocks
}

/** The rows of every table of a Markdown file, as lists of cells. */
export const rowsOf = (path) =>
  read(path)
    .split('\n')
    .filter((line) => /^\|.*\|$/.test(line) && !/^\|[-|]+\|$/.test(line))
    .map((line) => line.slice(1, -1).split('|').map((cell) => cell.trim()))

/** The body of an interface or a class in the package's types. */
export function interfaceOf(name) {
  const kind = '(?:interface|declare class)'
  const pattern = new RegExp(`^export ${kind} ${name} (?:(?:extends|implements) [^{]*)?\\{\\n([\\s\\S]*?)^\\}`, 'm')
  const body = read('index.d.ts').match(pattern)
  if (!body) throw new Error(`no interface ${name}`)
  return body[1]
}

/** The members of an interface, each with its `@default`; without one `'none'` if it is optional, else `'required'`. */
export function membersOf(name) {
  const members = new Map()
  const pattern = /^ {2}(?:\/\*\*([\s\S]*?)\*\/\n {2})?(?:readonly |get )?(\w+)(\??)[:(<]/gm
  for (const [, comment = '', member, optional] of interfaceOf(name).matchAll(pattern)) {
    const stated = comment.match(/@default (.*)/)?.[1].replace(/\s*\*?\s*$/, '')
    members.set(member, stated ?? (optional ? 'none' : 'required'))
  }
  return members
}
