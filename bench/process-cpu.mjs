// The CPU time of processes (`/proc`).
import { readdirSync, readFileSync } from 'node:fs'

/** Linux counts the CPU time of processes in hundredths of a second. */
const TICK_US = 10_000

/** Returns the CPU time of a process and of its children, those included that have ended. */
export function processUs(pid) {
  const ticks = (id, fields) => {
    try {
      const values = readFileSync(`/proc/${id}/stat`, 'latin1').split(') ')[1].split(' ')
      return fields.reduce((sum, field) => sum + Number(values[field]), 0)
    } catch {
      return 0
    }
  }
  const children = readdirSync('/proc').filter((id) => /^\d+$/.test(id) && parentOf(id) === pid)
  // utime, stime, and those of the ended children
  return (
    [ticks(pid, [11, 12, 13, 14]), ...children.map((id) => ticks(id, [11, 12]))].reduce((sum, one) => sum + one) *
    TICK_US
  )
}

function parentOf(id) {
  try {
    return Number(readFileSync(`/proc/${id}/stat`, 'latin1').split(') ')[1].split(' ')[1])
  } catch {
    return 0
  }
}
