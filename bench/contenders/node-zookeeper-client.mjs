// The npm package node-zookeeper-client: the recipe of a lock, step by step, and a bare creation and deletion of a node.
import { promisify } from 'node:util'
import zookeeper from 'node-zookeeper-client'

const { ACL, CreateMode, Event } = zookeeper
const { EPHEMERAL, EPHEMERAL_SEQUENTIAL } = CreateMode

export const kind = 'code'
export const packages = ['node-zookeeper-client']
export const does =
  'queue of nodes, each waits for the deletion of the one before it; no fencing token; no end but that of the session'
export const variants = { bare: { kind: 'driver', does: 'no lock: a node is created and deleted' } }
export const settings = {
  '': 'creates a sequential node, reads the children, watches the node before it',
  bare: 'creates a node and deletes it',
}

export async function connect({ urls: [url] }, variant) {
  const client = zookeeper.createClient(url.replace('zookeeper://', ''))
  const connected = new Promise((resolve) => client.once('connected', () => resolve(undefined)))
  client.connect()
  await connected
  const [create, remove, children, mkdirp] = [client.create, client.remove, client.getChildren, client.mkdirp].map(
    (call) => promisify(call).bind(client),
  )
  /** Waits until a node is deleted. */
  const deleted = (path) =>
    new Promise((resolve, reject) => {
      const changed = (event) => (event.getType() === Event.NODE_DELETED ? resolve(true) : watch())
      const watch = () =>
        client.exists(path, changed, (error, stat) => (error ? reject(error) : stat ? undefined : resolve(false)))
      watch()
    })
  const enter = async (folder) => {
    for (;;) {
      try {
        return await create(`${folder}/lock-`, null, ACL.OPEN_ACL_UNSAFE, EPHEMERAL_SEQUENTIAL)
      } catch (error) {
        if (error.getCode() !== zookeeper.Exception.NO_NODE) throw error
        await mkdirp(folder)
      }
    }
  }
  const acquire = async (name) => {
    const folder = `/bench-${name.replaceAll('/', '_')}`
    const path = await enter(folder)
    for (;;) {
      const names = (await children(folder)).sort()
      const index = names.indexOf(path.slice(folder.length + 1))
      if (index === 0) return () => remove(path)
      await deleted(`${folder}/${names[index - 1]}`)
    }
  }
  return {
    async pair(name) {
      if (variant === 'bare') {
        const path = `/bench-bare-${name.replaceAll('/', '_')}`
        await create(path, null, ACL.OPEN_ACL_UNSAFE, EPHEMERAL)
        await remove(path)
      } else {
        const release = await acquire(name)
        await release()
      }
    },
    wait: (name) => acquire(name),
    close: () => client.close(),
  }
}
