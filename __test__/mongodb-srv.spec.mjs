// MongoDB: `mongodb+srv` URLs, with a DNS server of the test. The server's address is a host of the domain 0.0.1, so that no other DNS
// has to know it.
import assert from 'node:assert/strict'
import { inspect } from 'node:util'
import { startDns } from './mongodb/dns.mjs'
import { SECRET, assertConnectFails, withMongod } from './mongodb/fixture.mjs'
import { assertFree, rejects, until } from './tools.mjs'

const NAME = 'cluster.0.0.1'
const RECORD = `_mongodb._tcp.${NAME}`

/** Starts a DNS server that names this server. */
async function dnsOf(fixture, server) {
  const dns = await startDns()
  fixture.onClose(() => dns.close())
  dns.srv[RECORD] = [['127.0.0.1', server.port]]
  return dns
}

const urlOf = ({ login = '', path = '', options = 'tls=false', name = NAME } = {}) =>
  `mongodb+srv://${login && `${login}@`}${name}/${path}?${options}`

async function locksWork(fixture, url, options) {
  const service = await fixture.connect(url, options)
  await assertFree(service, 'n')
  return service
}

withMongod('the DNS has the servers of a name, and options that the URL leaves out', async (fixture) => {
  const server = await fixture.startWithAuth()
  const rights = [{ role: 'readWrite', db: 'shop' }]
  await server.admin.db('admin').command({ createUser: 'app', pwd: `${SECRET}-app`, roles: rights })
  const dns = await dnsOf(fixture, server)
  const login = `app:${SECRET}-app`
  const of = (source) => new RegExp(`cannot log in as user "app" of the database "${source}"`)
  await assertConnectFails(urlOf({ login, path: 'shop' }), { retryable: false, why: of('shop') })
  dns.txt[NAME] = [['auth', 'Source=admin']]
  const service = await locksWork(fixture, urlOf({ login, path: 'shop' }))
  assert.match(inspect(service), new RegExp(`connectedTo: 'mongodb\\+srv://${NAME}`))
  await assertConnectFails(urlOf({ login, path: 'shop', options: 'tls=false&authSource=shop' }), {
    retryable: false,
    why: of('shop'),
  })
  dns.txt[NAME] = [['replicaSet=rs9&authSource=admin']]
  await assertConnectFails(urlOf({ login, path: 'shop' }), { retryable: false, why: /the replica set "rs9"/ })
  dns.txt = {}
  dns.srv[`_locks._tcp.${NAME}`] = dns.srv[RECORD]
  delete dns.srv[RECORD]
  await locksWork(fixture, urlOf({ login, path: 'shop', options: 'tls=false&authSource=admin&srvServiceName=locks' }))
})

withMongod('mongodb+srv switches TLS on', async (fixture) => {
  await dnsOf(fixture, await fixture.start())
  await assertConnectFails(urlOf({ options: '' }), { retryable: false, why: /it does not speak TLS/ })
})

withMongod('records that are missing or against the rules are an error that names them', async (fixture) => {
  const server = await fixture.start()
  const dns = await dnsOf(fixture, server)
  const of = (why) => new RegExp(`the servers of mongodb\\+srv://${NAME} cannot be resolved: ${why}`)
  dns.txt[NAME] = [['authSource=a'], ['authSource=b']]
  await assertConnectFails(urlOf(), { retryable: true, why: of(`${NAME} has 2 TXT records`) })
  dns.txt[NAME] = [['w=0']]
  await assertConnectFails(urlOf(), { retryable: true, why: of(`the TXT record of ${NAME} has "w=0"`) })
  dns.txt = {}
  dns.srv[RECORD] = [
    ['127.0.0.1', server.port],
    ['localhost', server.port],
  ]
  const why = of('an SRV record names the server "localhost", which is outside the domain "0.0.1"')
  await assertConnectFails(urlOf(), { retryable: true, why })
  // A name without a record of the type, and a name that does not exist.
  dns.srv[RECORD] = []
  await assertConnectFails(urlOf(), { retryable: true, why: of(`the DNS has no SRV record of ${RECORD}`) })
  dns.srv = {}
  await assertConnectFails(urlOf(), { retryable: true, why: of(`the DNS has no SRV record of ${RECORD}`) })
})

withMongod(
  'a DNS server that does not answer is an error, and is asked again with the next attempt',
  async (fixture) => {
    const dns = await dnsOf(fixture, await fixture.start())
    dns.isSilent = true
    const error = await assertConnectFails(urlOf(), {
      retryable: true,
      why: /the lookup in the DNS failed \(query|no answer of the DNS/,
    })
    assert.match(error.message, new RegExp(`mongodb\\+srv://${NAME} cannot be resolved`))
    const asked = dns.lookups.length
    const connecting = fixture.connect(urlOf(), { storeTimeoutMs: 1000, connectMs: 60_000 })
    await until('a second attempt', () => dns.lookups.length > asked + 4)
    const lazy = await fixture.connect(urlOf(), { storeTimeoutMs: 1000, lazy: true })
    await rejects(lazy.tryAcquire('n'), 'LOCK_STORE', { retryable: true })
    dns.isSilent = false
    await assertFree(await connecting, 'n')
    await until('the lazy service connects', () =>
      assertFree(lazy, 'n').then(
        () => true,
        () => false,
      ),
    )
  },
)
