// Reads fenced blocks and tables of Markdown files, and the interfaces of the package's types.
import { readFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

export const root = fileURLToPath(new URL('../..', import.meta.url))
export const read = (path) => readFileSync(new URL(`../../${path}`, import.meta.url), 'utf8')

/** Lists the fenced blocks: language, code and first line. Throws on a fence that the tests do not support. */
export function blocksOf(path) {
  const blocks = []
  let open
  read(path)
    .split('\n')
    .forEach((text, index) => {
      if (!/^\s*(```|~~~)/.test(text)) return open?.lines.push(text)
      const fence = text.match(/^```([\w-]*)$/)
      if (!fence) throw new Error(`${path}:${index + 1}: a fence that the tests do not support: ${text}`)
      if (open && fence[1]) throw new Error(`${path}:${index + 1}: a fence within a fence`)
      if (!open) return (open = { language: fence[1], line: index + 1, lines: [] })
      blocks.push({ language: open.language, line: open.line, code: `${open.lines.join('\n')}\n` })
      open = undefined
    })
  if (open) throw new Error(`${path}:${open.line}: a fence without an end`)
  return blocks
}

/** Lists the rows of all tables of a Markdown file, as lists of cells. */
export const rowsOf = (path) =>
  read(path)
    .split('\n')
    .filter((line) => /^\|.*\|$/.test(line) && !/^\|[-|]+\|$/.test(line))
    .map((line) =>
      line
        .slice(1, -1)
        .split('|')
        .map((cell) => cell.trim()),
    )

/** Returns the body of an interface or a class in the package's types. */
export function interfaceOf(name) {
  const kind = '(?:interface|declare class)'
  const pattern = new RegExp(`^export ${kind} ${name} (?:(?:extends|implements) [^{]*)?\\{\\n([\\s\\S]*?)^\\}`, 'm')
  const body = read('index.d.ts').match(pattern)
  if (!body) throw new Error(`no interface ${name}`)
  return body[1]
}

/** Maps the members of an interface to their `@default`; without one to `'none'` if optional, else to `'required'`. */
export function membersOf(name) {
  const members = new Map()
  const pattern = /^ {2}(?:\/\*\*([\s\S]*?)\*\/\n {2})?(?:readonly |get )?(\w+)(\??)[:(<]/gm
  for (const [, comment = '', member, optional] of interfaceOf(name).matchAll(pattern)) {
    const stated = comment.match(/@default (.*)/)?.[1].replace(/\s*\*?\s*$/, '')
    members.set(member, stated ?? (optional ? 'none' : 'required'))
  }
  return members
}
