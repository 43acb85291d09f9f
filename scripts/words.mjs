// Checks the vocabulary of docs/GLOSSARY.md: the words that it replaces do not come back in comments, documents and messages.
import { execFileSync } from 'node:child_process'
import { existsSync, readFileSync } from 'node:fs'
import { extname } from 'node:path'

/** The files and directories that are checked. */
const CHECKED = [
  '.github/',
  '__test__/',
  'bench/',
  'docs/',
  'examples/',
  'fuzz/',
  'lib/',
  'packages/',
  'scripts/',
  'src/',
  'build.rs',
  'index.d.ts',
  'testing.d.ts',
  'otel.d.ts',
  'index.js',
  'package.json',
  'CHANGELOG.md',
  'CONTRIBUTING.md',
  'README.md',
  'SECURITY.md',
]

/** Files that contain the words. */
const UNCHECKED = ['scripts/words.mjs', '__test__/words.spec.mjs']

/**
 * Each pattern of whole words, and what to write instead.
 *
 * @type {[RegExp, string][]}
 */
const WORDS = [
  ['tells?|telling|told', 'notify, report, return, name'],
  ['hears?|hearing|heard|ears?', 'receive, subscription'],
  ['beats?|signs? of life', 'heartbeat'],
  ['lanes?|fast paths?', 'connection'],
  ['places? in the (queue|line)|in line', 'position, in the queue'],
  ['(give|gives|gave|given|giving) (it |them |that )?(back|up)', 'release, roll back, cancel, time out'],
  ['(take|takes|took|taken|taking) (it |them |that )?back|withdraw\\w*|undo(es|ne|ing)?|undid', 'roll back'],
  ['let(s|ting)? go|(part|parts|parted|parting) with|frees|freed|freeing', 'release'],
  ['hand(s|ed|ing)? (it |them |that )?over', 'transfer'],
  ['prolong\\w*', 'renew, extend'],
  ['laps(e|es|ed|ing)|(is|are|was|were|be|been|being) over', 'expire, end'],
  ['nudg(e|es|ed|ing)|rings?|rang|rung|hints?', 'notify, wake'],
  ['look(s|ed|ing)?(?! like)', 'inspect, read, check, search'],
  ['patien(ce|t)|impatien(ce|t)', 'timeout, deadline'],
  [
    '(come|comes|came|coming) round|(a|one|this|that|each|every|same|next|per) turn|turns? of (the|its|an?) (event )?loop',
    'tick',
  ],
  ['tally|tallies|tenure', 'votes, request lifetime'],
  [
    'who|whoever|whom|whose turn|nobody|somebody|everybody|anybody',
    'name the subject: the process, the waiter, the caller',
  ],
  ['in vain|of late|be it|shall|so many', 'a plain sentence'],
].map(([words, instead]) => [new RegExp(`(?<![\\w-])(${words})(?![\\w-])`, 'gi'), instead])

/** The text of comments and of messages: string literals of several words. */
const LEXERS = {
  js: /(\/\/[^\n]*|\/\*[\s\S]*?\*\/)|('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|`(?:[^`\\]|\\[\s\S])*`)|(?<=[=(,:!&|?{};\n[]\s*)\/(?![*/\s])(?:[^/\\\n[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/[a-z]*/g,
  rust: /(\/\/[^\n]*|\/\*[\s\S]*?\*\/)|(r#+"[\s\S]*?"#+|"(?:[^"\\]|\\[\s\S])*")|'(?:[^'\\\n]|\\[^\n]{1,9}?)'/g,
  script: /(--[^\n]*)|('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")/g,
}
/** @type {Record<string, 'js' | 'rust' | 'script' | undefined>} */
const LEXER_OF = {
  '.mjs': 'js',
  '.cjs': 'js',
  '.js': 'js',
  '.ts': 'js',
  '.rs': 'rust',
  '.lua': 'script',
  '.sql': 'script',
}

/**
 * Replaces characters by blanks, so that positions stay the same.
 *
 * @param {string} text
 */
const blank = (text) => text.replace(/[^\n]/g, ' ')

/**
 * Returns the file with everything blanked out but its prose; `undefined` for a file without prose.
 *
 * @param {string} path
 * @param {string} text
 */
function prose(path, text) {
  if (path.endsWith('.md')) return text.replace(/^```[\s\S]*?^```|`[^`\n]*`|\]\([^)]*\)/gm, blank)
  const language = LEXER_OF[extname(path)]
  if (!language) return undefined
  let [result, end] = ['', 0]
  for (const { 0: token, 1: comment, 2: string, index } of text.matchAll(LEXERS[language])) {
    result += blank(text.slice(end, index))
    const isMessage = string !== undefined && /[a-z] [a-z]/.test(string)
    if (comment !== undefined) result += token.replace(/`[^`\n]*`/g, blank)
    else result += isMessage ? token.replace(/\$\{[^}]*\}|\b[\w-]+\.(mjs|rs|md)\b/g, blank) : blank(token)
    end = index + token.length
  }
  return result + blank(text.slice(end))
}

/**
 * Lists the words in one file that the glossary replaces: `{ line, word, text }`. The name of the file counts as its first line.
 *
 * @param {string} path
 * @param {string} text
 */
export function findings(path, text) {
  const name = path.replace(/[^a-zA-Z]+/g, ' ')
  const content = prose(path, text)
  if (content === undefined) return []
  const lines = [name, ...content.split('\n')]
  return lines.flatMap((line, index) =>
    WORDS.flatMap(([pattern, instead]) =>
      [...line.matchAll(pattern)].map(([word]) => ({
        line: Math.max(index, 1),
        word: word.toLowerCase(),
        instead,
        text: line.trim(),
      })),
    ),
  )
}

/** Lists the problems of the tree in the current directory. */
export function checkWords() {
  const listed = execFileSync('git', ['ls-files', '--cached', '--others', '--exclude-standard', ...CHECKED], {
    encoding: 'utf8',
  })
  const files = listed.split('\n').filter((path) => path && existsSync(path) && !UNCHECKED.includes(path))
  return files.flatMap((path) =>
    findings(path, readFileSync(path, 'utf8')).map(
      ({ line, word, instead, text }) => `${path}:${line}: "${word}" (instead: ${instead}): ${text}`,
    ),
  )
}
