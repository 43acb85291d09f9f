// The TLS option of the drivers of SQL servers.
import { readFileSync } from 'node:fs'

/**
 * Returns the option for a server whose certificate this authority has issued; without a file, no option.
 *
 * @param {string | undefined} caFile
 */
export const sslOf = (caFile) => (caFile ? { ssl: { ca: readFileSync(caFile, 'utf8') } } : {})
