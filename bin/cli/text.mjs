// Text for terminals.

/** @typedef {import('../../index.js').LockInfo} LockInfo */
/** @typedef {import('../../index.js').PermitInfo} PermitInfo */
/** @typedef {import('../../index.js').SharedInfo} SharedInfo */

/** The limit of readers and writers; a writer has all of these permits. */
const MAX_PERMITS = 1_048_576

/**
 * Control characters, which a terminal may execute; characters that end a line or change the direction of text, which make one
 * name look like another.
 */
// eslint-disable-next-line no-control-regex
const UNSAFE = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g
/** Characters that take two columns: East Asian wide ones and emoji. */
const WIDE =
  /^[\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\ua960-\ua97f\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6\u{1f300}-\u{1faff}\u{20000}-\u{3fffd}]|^\p{Emoji_Presentation}/u
/** Characters that take no column. */
const NARROW = /^[\p{M}\u200b-\u200d\u2060\ufeff]/u

/**
 * Escapes what a terminal would execute or reorder: `\u001b` for an escape.
 *
 * @param {string} text
 */
export function printable(text) {
  return text.replace(UNSAFE, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, '0')}`)
}

/**
 * Writes a message to standard error.
 *
 * @param {string} text
 */
export function complain(text) {
  console.error(`holdfast: ${printable(text)}`)
}

/** @param {string} char */
function columnsOf(char) {
  return NARROW.test(char) ? 0 : WIDE.test(char) ? 2 : 1
}

/**
 * Returns the columns of a text in a terminal.
 *
 * @param {string} text
 */
export function widthOf(text) {
  let width = 0
  for (const char of text) width += columnsOf(char)
  return width
}

/**
 * Cuts a line to the width of a terminal.
 *
 * @param {string} line
 * @param {number} columns
 */
export function cut(line, columns) {
  if (widthOf(line) <= columns) return line
  let [kept, width] = ['', 0]
  for (const char of line) {
    width += columnsOf(char)
    if (width > columns - 1) break
    kept += char
  }
  return `${kept}…`
}

/** @param {LockInfo | PermitInfo} info */
export function processOf({ holder }) {
  return holder ? `${holder.pid} on ${printable(holder.host)}` : 'of another tool'
}

/** @param {PermitInfo} info */
function shareOf({ permits, limit }) {
  if (limit < MAX_PERMITS) return `${permits} of ${limit}`
  return permits === MAX_PERMITS ? 'write' : 'read'
}

/**
 * Returns the state of a semaphore or a read/write lock as a line of text.
 *
 * @param {SharedInfo} info
 */
export function summaryOf({ name, used, limit, waiting, holders }) {
  if (limit === null) return `${printable(name)} is free`
  const [{ length }, isWriter] = [holders, used === MAX_PERMITS]
  const held =
    limit < MAX_PERMITS
      ? `${used} of ${limit} permits in use`
      : `held by ${isWriter ? 'a writer' : `${length} reader${length === 1 ? '' : 's'}`}`
  return `${printable(name)}: ${held}, ${waiting ?? '-'} waiting`
}

/**
 * Returns locks, or the holders of a semaphore or a read/write lock, as lines of text, under a header.
 *
 * @param {LockInfo[] | SharedInfo} found
 * @param {number} [most] the largest number of rows
 */
export function table(found, most) {
  const isList = Array.isArray(found)
  const rows = (isList ? found : found.holders)
    .slice(0, most)
    .map((info) => [
      ...('permits' in info ? [shareOf(info)] : [printable(info.name), String(info.waiting ?? '-')]),
      processOf(info),
      info.holder?.since.toISOString() ?? '-',
      Number.isFinite(info.remainingMs) ? `${(info.remainingMs / 1000).toFixed(1)}s` : 'no end',
      String(info.fencingToken ?? '-'),
      info.metadata === null ? '' : printable(JSON.stringify(info.metadata)),
    ])
  const first = isList ? ['NAME', 'WAITING'] : ['SHARE']
  const all = [[...first, 'PROCESS', 'SINCE', 'REMAINING', 'TOKEN', 'METADATA'], ...rows]
  const widths = all[0].map((_, column) => Math.max(...all.map((row) => widthOf(row[column]))))
  return all.map((row) => {
    const cells = row.map((cell, column) => cell + ' '.repeat(widths[column] - widthOf(cell)))
    return cells.join('  ').trimEnd()
  })
}
