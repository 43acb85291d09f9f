// Makes docs/api.md from index.d.ts: each public class, function, interface and type with its doc comment.
//
//   node scripts/api.mjs        writes docs/api.md (the build does it, too)
import { readFileSync, writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const HEADER = `# API

Made from [index.d.ts](../index.d.ts) by \`scripts/api.mjs\`. Your editor shows the same text. [Getting started](getting-started.md) is a
shorter way in; [errors](errors.md) has the error codes, [holdfast/testing](recipes/testing.md) the helper for tests.
`

/** The order of the page. Everything else follows in the order of the file. */
const FIRST = ['LockService', 'Lock', 'AcquireOptions', 'ExecuteOptions', 'ConnectOptions', 'LockError', 'isLockError']

/** @typedef {{ comment: string, code: string[] }} Item A doc comment without its frame, and the lines of its declaration. */

/**
 * Returns how many brackets are open after a text.
 *
 * @param {string} text
 */
const depthOf = (text) =>
  [...text.matchAll(/[({[]|[)}\]]/g)].reduce((depth, [c]) => depth + ('({['.includes(c) ? 1 : -1), 0)

/**
 * Whether a line continues a declaration: it is indented further, or ends the arguments of a type.
 *
 * @param {string | undefined} line
 * @param {string} indent
 */
const continues = (line, indent) => line?.startsWith(`${indent}  `) || line?.startsWith(`${indent}>`)

/**
 * Splits lines into items: a doc comment and a declaration that begins at `indent`. A declaration goes on while brackets are open, or
 * while the next lines are indented further.
 *
 * @param {string[]} lines
 * @param {string} indent
 */
function itemsOf(lines, indent) {
  const items = []
  /** @type {string[]} */
  let comment = []
  for (let at = 0; at < lines.length; at++) {
    if (lines[at].trim() === '' || lines[at].startsWith('///')) continue
    if (lines[at].startsWith(`${indent}/**`)) {
      comment = [lines[at]]
      while (!lines[at].endsWith('*/')) comment.push(lines[++at])
      continue
    }
    const code = [lines[at]]
    while (depthOf(code.join('\n')) > 0 || continues(lines[at + 1], indent)) code.push(lines[++at])
    items.push({ comment: textOf(comment), code })
    comment = []
  }
  return items
}

/**
 * Removes the frame of a doc comment.
 *
 * @param {string[]} lines
 */
const textOf = (lines) =>
  lines
    .map((line) => line.replace(/^\s*(\/\*\*|\*\/|\*) ?/, '').replace(/ ?\*\/$/, ''))
    .join('\n')
    .replaceAll(/\{@link (\w+)\}/g, (_, name) => `[${name}](#${name.toLowerCase()})`)
    .trim()

/**
 * Separates the text of a comment from its tags.
 *
 * @param {string} comment
 */
function tagsOf(comment) {
  const [text, ...tags] = comment.split(/\n?^@(?=\w)/m)
  return {
    text: text.trim(),
    tags: tags.map((tag) => [tag.split(/\s/, 1)[0], tag.slice(tag.split(/\s/, 1)[0].length).trim()]),
  }
}

/** @param {string} text */
const oneLine = (text) => text.trim().replaceAll(/\s+/g, ' ')
/** @param {string[]} code */
const codeOf = (code) => oneLine(code.join(' ')).replace(/;$/, '')
/** @param {string} code */
const nameOf = (code) => /^(?:static |readonly |get |private )*(\[[\w.]+\]|\w+)/.exec(code)?.[1]

/**
 * Writes the text of a comment, and its tags except for `@default`.
 *
 * @param {string} comment
 */
function proseOf(comment) {
  const { text, tags } = tagsOf(comment)
  const lines = text ? [text, ''] : []
  const listed = tags.filter(([tag]) => ['param', 'returns', 'throws'].includes(tag))
  for (const [tag, body] of listed) {
    const parts = tag === 'param' ? /^(\w+)\s+([\s\S]*)/.exec(body) : [body, '', body]
    if (!parts) throw new Error(`@param without a name and a text: ${body}`)
    const [, name, rest] = parts
    lines.push(`- ${tag === 'param' ? `\`${name}\`` : `**${tag}**`}: ${oneLine(rest)}`)
  }
  if (listed.length > 0) lines.push('')
  for (const [tag, body] of tags) if (tag === 'example') lines.push('```ts', body, '```', '')
  return lines
}

/**
 * Writes the members of a class: a heading for each, its overloads, its text.
 *
 * @param {Item[]} members
 */
function classOf(members) {
  /** @type {Map<string | undefined, { signatures: string[], prose: string[] }>} */
  const groups = new Map()
  for (const { comment, code } of members) {
    const text = codeOf(code)
    const name = nameOf(text)
    if (text.startsWith('private ') || name === 'constructor') continue
    const group = groups.get(name) ?? { signatures: [], prose: [] }
    group.signatures.push(`- \`${text}\``)
    group.prose.push(...proseOf(comment))
    groups.set(name, group)
  }
  return [...groups].flatMap(([name, { signatures, prose }]) => [`### ${name}`, '', ...signatures, '', ...prose])
}

/**
 * Writes the members of an interface as a table. A union has no vertical bars there: they separate the cells.
 *
 * @param {Item[]} members
 */
function tableOf(members) {
  /** @param {string} text */
  const cell = (text) => oneLine(text).replaceAll('|', 'or')
  const rows = members.map(({ comment, code }) => {
    const text = codeOf(code)
    const { text: prose, tags } = tagsOf(comment)
    const [, name, optional, type] = /^(?:readonly )?(\w+)(\??)(?:: ?)?([\s\S]*)$/.exec(text) ?? [text, text, '', '']
    const fallback = tags.find(([tag]) => tag === 'default')?.[1] ?? (optional ? 'none' : '')
    const shown = type.replace(/ \| undefined$/, '')
    return `| \`${name}\` | \`${cell(shown)}\` | ${cell(fallback)} | ${cell(prose)} |`
  })
  return ['| member | type | default | |', '|---|---|---|---|', ...rows, '']
}

/**
 * Writes one declaration of the file.
 *
 * @param {Item} item
 */
function sectionOf({ comment, code }) {
  const text = code.join('\n')
  const declared = /^export (?:declare )?(class|function|interface|type) (\w+)/.exec(text)
  if (!declared) throw new Error(`not an exported class, function, interface or type: ${text}`)
  const [, kind, name] = declared
  const lines = [`## ${name}`, '']
  const body = code.slice(1, -1)
  if (kind === 'class' || kind === 'interface') {
    const base = / extends ([\w<>', ]+?) \{/.exec(code[0])?.[1]
    if (kind === 'interface' && base) lines.push(`Extends \`${base}\`.`, '')
    lines.push(...proseOf(comment), ...(kind === 'class' ? classOf : tableOf)(itemsOf(body, '  ')))
  } else {
    lines.push(`\`${codeOf(code).replace(/^export (declare )?/, '')}\``, '', ...proseOf(comment))
  }
  return { name, text: lines.join('\n') }
}

/**
 * Returns the page for the text of index.d.ts.
 *
 * @param {string} types
 */
export function apiOf(types) {
  const sections = itemsOf(types.split('\n'), '').map(sectionOf)
  /** @param {{ name: string }} section */
  const rank = ({ name }) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length)
  const sorted = [...sections].sort((a, b) => rank(a) - rank(b))
  return `${[HEADER, ...sorted.map(({ text }) => text)].join('\n').trim()}\n`
}

/** Writes docs/api.md. */
export function writeApi() {
  /** @param {string} path */
  const at = (path) => new URL(`../${path}`, import.meta.url)
  writeFileSync(at('docs/api.md'), apiOf(readFileSync(at('index.d.ts'), 'utf8')))
}

if (process.argv[1] === fileURLToPath(import.meta.url)) writeApi()
