// Reads fenced blocks and tables of Markdown files, and the interfaces of the package's types.
import { readdirSync, readFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

export const root = fileURLToPath(new URL('../..', import.meta.url))
export const read = (path) => readFileSync(new URL(`../../${path}`, import.meta.url), 'utf8')

/**
 * Joins the text of a fence to one line.
 *
 * @param {string} text
 */
export const oneLine = (text) => text.trim().split(/\s+/).join(' ')

/** Lists the Markdown files in docs/. */
export const documents = () =>
  readdirSync(new URL('../../docs', import.meta.url), { recursive: true })
    .map((path) => `docs/${String(path).replaceAll('\\', '/')}`)
    .filter((path) => path.endsWith('.md'))
    .sort()

/**
 * Lists the fenced blocks: document, language, code and first line. `check` is the text of a comment `<!-- check: … -->` in the line before
 * the fence. Throws on a fence that the tests do not support.
 */
export function blocksOf(path) {
  const blocks = []
  let open
  let before = ''
  read(path)
    .split('\n')
    .forEach((text, index) => {
      const check = /^<!-- check: (\w+) -->$/.exec(before)?.[1]
      before = text
      if (!/^\s*(```|~~~)/.test(text)) return open?.lines.push(text)
      const fence = text.match(/^```([\w-]*)$/)
      if (!fence) throw new Error(`${path}:${index + 1}: a fence that the tests do not support: ${text}`)
      if (open && fence[1]) throw new Error(`${path}:${index + 1}: a fence within a fence`)
      if (!open) return (open = { language: fence[1], check, line: index + 1, lines: [] })
      const { lines, ...block } = open
      blocks.push({ document: path, ...block, code: `${lines.join('\n')}\n` })
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

/** Returns the names of the members of an interface or a class in the package's types. */
export function membersOf(name) {
  const kind = '(?:interface|declare class)'
  const pattern = new RegExp(`^export ${kind} ${name} (?:(?:extends|implements) [^{]*)?\\{\\n([\\s\\S]*?)^\\}`, 'm')
  const body = read('index.d.ts').match(pattern)
  if (!body) throw new Error(`no interface ${name}`)
  return [...body[1].matchAll(/^ {2}(?:readonly |get |static )?(\w+)\??[:(<]/gm)].map(([, member]) => member)
}
