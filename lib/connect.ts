// Validates the arguments of `LockService.connect`.
import { statSync } from 'node:fs'
import { homedir, userInfo } from 'node:os'
import { join } from 'node:path'
import { positiveMs } from './durations.js'
import { describe, invalid, warn } from './errors.js'
import type { Config } from './native.js'
import { callback, DEFAULTS, fields, flag, isObject, pick, recordOf, requestOf, text } from './options.js'
import type { Fields } from './options.js'
import { isObserved } from './telemetry.js'
import type { LockEvent } from './types.js'

const MAX_URLS = 100

const LOGIN = ['username', 'password', 'credentials']
const OTHERS =
  'host port database listenUrl tls keyPrefix collection table storeTimeoutMs connectMs lazy minReplicas maxConnections ' +
  'sessionTimeoutMs ' +
  'defaults onEvent'
const CONNECT = [...OTHERS.split(' '), ...LOGIN]
/** The options that are one value each, and their checks. */
const CHECKS: Record<string, (name: string, value: unknown) => string | number> = {
  listenUrl: (name, value) => text(name, isObject(value) && 'href' in value ? value['href'] : value),
  keyPrefix: text,
  collection: filled,
  table: filled,
  storeTimeoutMs: positiveMs,
  connectMs: (name, value) => (value === 0 ? 0 : positiveMs(name, value)),
  sessionTimeoutMs: positiveMs,
  minReplicas: (name, value) => wholeNumber(name, value, 0, 100),
  maxConnections: (name, value) => wholeNumber(name, value, 1, 100),
}
const PEM = ['ca', 'cert', 'key'] as const
const TLS = [...PEM, ...PEM.map((name) => `${name}File`), 'servername', 'insecure']
/** Methods of the clients of ioredis, node-redis, MongoDB and Mongoose. Options have none of them. */
const CLIENT_METHODS = ['connect', 'sendCommand', 'disconnect']
const EXAMPLE =
  'such as redis://HOST:6379, mongodb://HOST:27017, postgres://HOST:5432/DATABASE, mysql://HOST:3306/DATABASE, etcd://HOST:2379, ' +
  'zookeeper://HOST:2181 or sqlite:PATH (or set HOLDFAST_URL)'
const OTHER_STORE = 'for a store other than Redis, MongoDB, PostgreSQL, MySQL, etcd and ZooKeeper'
const ONLY_REDIS =
  ': host, port and database are the form for Redis. Other stores take a URL, such as postgres://HOST:5432/DATABASE'
/** The variables of PostgreSQL's tools that have what a URL leaves out. */
const POSTGRES = 'PGHOST PGPORT PGUSER PGPASSWORD PGDATABASE PGSSLMODE PGSSLROOTCERT PGPASSFILE'.split(' ')

/** @internal The function that returns the login of a new connection, and its option. */
export interface LoginSource {
  option: 'password' | 'credentials'
  ask: () => unknown
}

/** @internal The checked arguments of `LockService.connect`. */
export interface ConnectRequest {
  config: Config
  onEvent: ((event: LockEvent) => unknown) | undefined
  credentials: LoginSource | undefined
  lazy: boolean
}

/** Rejects a target that is present but empty: probably a setting is missing, and the local store is not what is meant. */
function checkPresent(argument: string, target: unknown): void {
  if (target !== undefined && target !== null && target !== '') return
  const rule =
    'must not be empty: probably a setting is missing. Omit it to connect to HOLDFAST_URL if that is set, and otherwise to the ' +
    'embedded store'
  throw invalid(argument, rule, describe(target))
}

/** @internal Checks the arguments of `LockService.connect`. `isPresent`: whether there are any. */
export function connectionOf(target: unknown, second: unknown, isPresent: boolean): ConnectRequest {
  let urls = target
  let options: Fields
  if (isObject(target) && typeof target['href'] !== 'string') {
    if (CLIENT_METHODS.some((name) => typeof target[name] === 'function')) {
      const rule =
        'must be a URL or an options object, not a client: a LockService opens connections of its own; pass the URL'
      throw invalid('target', rule, 'an object with methods')
    }
    if (second !== undefined) {
      throw invalid('options', 'must be absent when the target is an options object', describe(second))
    }
    options = fields('target', target, ['url', ...CONNECT])!
    urls = options['url']
    for (const name of ['url', 'host']) if (name in options) checkPresent(name, options[name])
  } else {
    if (isPresent) checkPresent('target', target)
    options = fields('options', second, CONNECT) ?? {}
  }
  const tls = fields('tls', options['tls'], TLS)
  const located = separateUser(serverOf(options, urls, tls !== undefined) ?? urlsOf(urls), options)
  const { login, credentials } = loginOf({ ...options, ...located.login })
  const config: Config = { urls: located.urls.map(login), defaults: {}, events: false }
  if (config.urls.length === 0) {
    const [name] = [...LOGIN, 'tls'].filter((name) => options[name] !== undefined)
    if (name !== undefined)
      throw invalid(name, 'must be absent without a URL or a host', 'an options object without one')
  }
  if (tls !== undefined && config.urls.some((url) => url.startsWith('sqlite:'))) {
    throw invalid('tls', `must be absent ${OTHER_STORE}`, 'a URL of sqlite:')
  }
  if (config.urls.length === 0) warnOfEmbedded()
  if (credentials) config.credentials = true
  if (config.urls.some((url) => /^postgres(ql)?:/.test(url))) config.environment = environmentOfPostgres()
  for (const [name, check] of Object.entries(CHECKS)) {
    if (options[name] !== undefined) Object.assign(config, { [name]: check(name, options[name]) })
  }
  let value: unknown
  for (const name of PEM) {
    const file = `${name}File` as const
    if ((value = tls?.[file]) !== undefined) {
      if (/[\n\r]|-----BEGIN/.test(String(value)))
        throw invalid(`tls.${file}`, `must be a path (tls.${name} takes PEM text)`, 'PEM text')
      config[file] = text(`tls.${file}`, value)
    }
    if ((value = tls?.[name]) === undefined) continue
    if (config[file] !== undefined) throw invalid(`tls.${name}`, `must be absent with tls.${file}`, 'both')
    config[name] = pemOf(`tls.${name}`, value)
  }
  if ((value = tls?.['servername']) !== undefined) config.servername = text('tls.servername', value)
  if ((value = tls?.['insecure']) !== undefined) config.insecure = flag('tls.insecure', value)
  const defaults = fields('defaults', options['defaults'], DEFAULTS) ?? {}
  config.defaults = recordOf(requestOf(pick(defaults, DEFAULTS), true))
  const onEvent = options['onEvent']
  config.events = onEvent !== undefined || isObserved()
  return {
    config,
    onEvent: onEvent === undefined ? undefined : callback('onEvent', onEvent),
    credentials,
    lazy: (value = options['lazy']) !== undefined && flag('lazy', value),
  }
}

/**
 * Returns the variables of PostgreSQL that are set. Without them the password file is in the home folder, and the user is this one. A
 * password file that other users may access is left out, as PostgreSQL's tools do.
 */
function environmentOfPostgres(): Record<string, string> {
  const environment: Record<string, string> = {}
  for (const name of POSTGRES) {
    const value = process.env[name]
    if (value) environment[name] = value
  }
  const isWindows = process.platform === 'win32'
  // Both functions of the system throw for a user without an entry in its list.
  try {
    const file = isWindows
      ? join(process.env['APPDATA'] ?? '', 'postgresql', 'pgpass.conf')
      : join(homedir(), '.pgpass')
    environment['PGPASSFILE'] ??= file
    environment['PGUSER'] ??= userInfo().username
  } catch {
    // The URL has to name the user, and the password.
  }
  const file = environment['PGPASSFILE']
  if (file !== undefined && !isWindows && ((statSync(file, { throwIfNoEntry: false })?.mode ?? 0) & 0o077) !== 0) {
    warn(
      'HOLDFAST_STORE',
      `the password file ${file} is ignored: other users may access it; its permissions should be u=rw (0600)`,
    )
    delete environment['PGPASSFILE']
  }
  return environment
}

let isEmbeddedWarned = false

/** Warns, once, of the embedded store in production. */
function warnOfEmbedded(): void {
  if (process.env['NODE_ENV'] !== 'production' || isEmbeddedWarned) return
  isEmbeddedWarned = true
  warn(
    'HOLDFAST_EMBEDDED_STORE',
    'LockService.connect() has no target, and HOLDFAST_URL is not set: locks are in the embedded store, a file that only the ' +
      'processes of this machine and user share. Set HOLDFAST_URL or pass a URL; pass `sqlite:PATH` if this is intended.',
  )
}

/** Checks PEM text. Returns it without the indentation that YAML adds. */
function pemOf(argument: string, value: unknown): string {
  const pem = text(argument, value)
  const rule = 'must be PEM text with line breaks'
  if (pem.includes('\\n-----END')) {
    throw invalid(argument, `${rule}: apply .replaceAll('\\\\n', '\\n')`, 'text with escaped line breaks (\\n)')
  }
  if (/-----BEGIN [^-\n\r]*-----[^\n\r]*[^\s]/.test(pem)) {
    const quote = 'a shell needs quotes around the variable ("$CA"), YAML the block style |'
    throw invalid(argument, `${rule}: ${quote}`, 'text without a line break after -----BEGIN')
  }
  return pem.replace(/^[\t ]+|[\t ]+$/gm, '')
}

/** Checks a text that must not be empty. */
function filled(argument: string, value: unknown): string {
  if (value === '') throw invalid(argument, 'must not be empty', '""')
  return text(argument, value)
}

/** Checks a whole number. `note` is appended to the rule in the error message. */
function wholeNumber(argument: string, value: unknown, from: number, to: number, note = ''): number {
  if (Number.isInteger(value) && (value as number) >= from && (value as number) <= to) return value as number
  throw invalid(argument, `must be a whole number from ${from} to ${to}${note}`, describe(value))
}

/** Returns the URL of `host`, `port` and `database`. `undefined`: the options have no host. */
function serverOf(options: Fields, urls: unknown, secure: boolean): string[] | undefined {
  const { host, port, database } = options
  if (host === undefined) {
    const [name] = ['port', 'database'].filter((name) => options[name] !== undefined)
    if (name === undefined) return undefined
    throw invalid(name, 'must be a part of the URL, or be set together with host', describe(options[name]))
  }
  if (urls !== undefined) throw invalid('host', 'must be absent with a URL', 'both')
  const name = text('host', host)
  if (!/^[^\s/@?#%,[\]]+$/.test(name) || /^[^:]*:[^:]*$/.test(name)) {
    throw invalid('host', 'must be a host name or an IP address, without scheme and port', 'other text')
  }
  const address = name.includes(':') ? `[${name}]` : name
  const number = port === undefined ? 6379 : wholeNumber('port', port, 1, 65_535)
  const path = database === undefined ? 0 : wholeNumber('database', database, 0, 999_999_999, ONLY_REDIS)
  return [`redis${secure ? 's' : ''}://${address}:${number}/${path}`]
}

/**
 * Moves the user of the URLs into `login`, if all URLs have the same user and no password, and the options have a password and no user
 * name. Otherwise returns the URLs unchanged.
 */
function separateUser(urls: string[], options: Fields): { urls: string[]; login?: { username: string } } {
  if (options['password'] === undefined || options['username'] !== undefined) return { urls }
  const parts = urls.map((url) => /^([\w+]+:\/\/)([^:/?#@]+)@([^@]*)$/.exec(url))
  const [user] = parts.map((part) => part?.[2])
  if (user === undefined || parts.some((part) => part?.[2] !== user)) return { urls }
  return { urls: parts.map((part) => part![1]! + part![3]!), login: { username: decoded(user) } }
}

/** Returns a part of a URL without its percent-encoding. An invalid one stays unchanged. */
function decoded(part: string): string {
  try {
    return decodeURIComponent(part)
  } catch {
    return part
  }
}

/** Returns a function that adds the login of the options to a URL, or the function that provides it for each connection. */
function loginOf(options: Fields): { login: (url: string) => string; credentials: LoginSource | undefined } {
  const { username, password, credentials } = options
  const user = username === undefined ? undefined : text('username', username)
  const names = LOGIN.filter((name) => options[name] !== undefined)
  if (credentials !== undefined) {
    if (typeof credentials !== 'function') throw invalid('credentials', 'must be a function', kindOf(credentials))
    if (names.length > 1) throw invalid('credentials', `must be absent with ${names[0]}`, 'both')
    const source = { option: 'credentials', ask: credentials as () => unknown } as const
    return { login: withoutLogin('credentials'), credentials: source }
  }
  if (typeof password === 'function') {
    const ask = async () => {
      const returned: unknown = await password()
      if (typeof returned !== 'string') throw invalid('password', 'must return a string', kindOf(returned))
      return { username: user, password: returned }
    }
    const check = withoutLogin('password')
    const login = (url: string) => {
      if (!/^(mongodb|mysql|mariadb|etcd|zookeeper)/.test(url)) return check(url)
      const rule = 'must be a string for MongoDB, MySQL, etcd and ZooKeeper: a function is for Redis and PostgreSQL'
      throw invalid('password', rule, 'a function')
    }
    return { login, credentials: { option: 'password', ask } }
  }
  if (password !== undefined && typeof password !== 'string') {
    throw invalid('password', 'must be a string, or a function that returns one', kindOf(password))
  }
  if (names.length === 0) return { login: (url) => url, credentials: undefined }
  const secret = password === undefined ? undefined : text('password', password)
  const check = withoutLogin(names[0]!)
  const login = (url: string) => {
    check(url)
    if (isSocket(url)) {
      const parts = [user && `user=${encodeURIComponent(user)}`, secret && `pass=${encodeURIComponent(secret)}`]
      return `${url}${url.includes('?') ? '&' : '?'}${parts.filter(Boolean).join('&')}`
    }
    const part = secret === undefined ? '' : `:${encodeURIComponent(secret)}`
    return url.replace('://', () => `://${encodeURIComponent(user ?? '')}${part}@`)
  }
  return { login, credentials: undefined }
}

const isSocket = (url: string) => /^(redis|valkey)(\+unix:|:\/\/\/)/.test(url)

/** Returns a function that checks that a URL has no login, and is not one of a store without logins. */
function withoutLogin(argument: string): (url: string) => string {
  return (url) => {
    const [store] = /^(sqlite|memory):/.exec(url) ?? []
    if (store !== undefined) throw invalid(argument, `must be absent ${OTHER_STORE}`, `a URL of ${store}`)
    if (/@|[?&](user|pass|password)=/.test(url.split('://', 2)[1] ?? ''))
      throw invalid(argument, 'must be absent with a login in the URL', 'both')
    return url
  }
}

/** Returns the URLs of a target. Without a target: the URL in the environment, if it is set. */
function urlsOf(target: unknown): string[] {
  if (target === undefined) {
    const url = process.env['HOLDFAST_URL']
    if (url === '')
      throw invalid('HOLDFAST_URL', 'must not be empty: set it to the URL of the store, or unset it', '""')
    return url === undefined ? [] : [urlOf(url)]
  }
  if (typeof target === 'string' || isObject(target)) return [urlOf(target)]
  if (!Array.isArray(target)) {
    throw invalid('target', 'must be a URL, a list of URLs, or an options object', describe(target))
  }
  if (target.length > MAX_URLS) throw invalid('target', `must be at most ${MAX_URLS} URLs`, `${target.length} URLs`)
  if (target.length === 0) throw invalid('target', 'must not be an empty list', '[]')
  return Array.from({ length: target.length }, (_, index) => urlOf(target[index]))
}

/** Checks that a value is a URL as text or as an object. The native core parses it. */
function urlOf(value: unknown): string {
  const url = text('target', isObject(value) ? value['href'] : value)
  if (url === '') throw invalid('target', `must be a URL ${EXAMPLE}`, '""')
  return url
}

/** @internal Returns the login of a new connection as the answer to a question: a user name or `null`, and a password. */
export async function askForLogin({ option, ask }: LoginSource): Promise<[string | null, string]> {
  try {
    const login = await ask()
    const rule = 'must return { username?, password }'
    if (!isObject(login)) throw invalid('credentials', rule, kindOf(login))
    const { username, password, ...others } = login
    for (const key in others) throw invalid('credentials', rule, `an object with the unknown key ${describe(key)}`)
    if (typeof password !== 'string' || !(username == null || typeof username === 'string'))
      throw invalid('credentials', `${rule} with strings`, 'an object')
    return [username || null, password]
  } catch (thrown) {
    throw new Error(`the function of ${option} failed: ${reasonOf(thrown)}`)
  }
}

/** Returns what a value is. It may be a secret: no part of it is shown. */
const kindOf = (value: unknown) => (value === null ? 'null' : `a value of type ${typeof value}`)

/** @internal Returns the message of what was thrown. */
export function reasonOf(thrown: any): string {
  try {
    return typeof thrown?.message === 'string' ? thrown.message.toWellFormed() : describe(thrown)
  } catch {
    return 'with a value that cannot be shown'
  }
}
