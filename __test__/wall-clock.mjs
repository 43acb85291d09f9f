// Steps the wall clock of a running process. It replaces `clock_gettime` in the vDSO of the process, so that it also works for programs
// that read the time without libc, as those in Go do. Monotonic clocks and the timers of the kernel stay.
import { open, readFile } from 'node:fs/promises'

/** Why it does not work here; empty: it does. */
export const noSteps = process.platform === 'linux' && process.arch === 'x64' ? '' : 'only on Linux x64'

// The system call; if the clock is CLOCK_REALTIME, `add qword [rsi], STEP`; `ret`.
const CODE = Buffer.from('b8e4000000 0f05 85ff 7507 488106 00000000 c3'.replaceAll(' ', ''), 'hex')
const STEP_AT = 14

/**
 * Makes the wall clock of a server's process differ from the system's by `seconds`. Other processes are not affected.
 *
 * @param {{ pid: number | undefined, pause: () => Promise<void>, resume: () => void }} server
 * @param {number} seconds
 */
export async function setWallClock(server, seconds) {
  const { pid } = server
  const [, start, end] = /^(\w+)-(\w+) .*\[vdso\]$/m.exec(await readFile(`/proc/${pid}/maps`, 'latin1')) ?? []
  const base = parseInt(start, 16)
  const memory = await open(`/proc/${pid}/mem`, 'r+')
  try {
    const image = Buffer.alloc(parseInt(end, 16) - base)
    await memory.read(image, 0, image.length, base)
    const code = Buffer.from(CODE)
    code.writeInt32LE(seconds, STEP_AT)
    await server.pause()
    await memory.write(code, 0, code.length, base + addressOf(image, '__vdso_clock_gettime'))
  } finally {
    server.resume()
    await memory.close()
  }
}

/** Returns the address of a symbol in an ELF image. @param {Buffer} image @param {string} wanted */
function addressOf(image, wanted) {
  const number = (/** @type {number} */ at) => Number(image.readBigUInt64LE(at))
  const sections = Array.from({ length: image.readUInt16LE(60) }, (_, index) => number(40) + 64 * index)
  const dynsym = sections.find((at) => image.readUInt32LE(at + 4) === 11) ?? 0
  const names = number(sections[image.readUInt32LE(dynsym + 40)] + 24)
  const [from, size] = [number(dynsym + 24), number(dynsym + 32)]
  for (let at = from; at < from + size; at += 24) {
    const name = names + image.readUInt32LE(at)
    if (image.toString('latin1', name, name + wanted.length + 1) === `${wanted}\0`) return number(at + 8)
  }
  throw new Error(`the vDSO has no ${wanted}`)
}
