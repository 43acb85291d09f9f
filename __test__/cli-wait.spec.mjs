// `holdfast run --wait` on stores that hand locks off: the command gets the whole ttl.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { LockService } from '../index.js'
import { start, TIMEOUT_MS } from './cli.mjs'
import { missing, random, serverUrl, skip } from './stores.mjs'
import { until } from './tools.mjs'

for (const kind of ['redis', 'mongodb-replica-set', 'postgres', 'mysql', 'etcd', 'zookeeper']) {
  test(`run --wait runs its command with the whole ttl on ${kind}`, { timeout: TIMEOUT_MS }, async (t) => {
    const reason = missing(kind)
    if (reason) return skip(t, reason)
    const [server, name] = [String(serverUrl(kind)), `wait:${random()}`]
    const service = await LockService.connect(server)
    for (const wait of [
      ['--wait', '30s'],
      ['--once-per', '1s', '--wait', '30s'],
      ['--ttl', '8s', '--wait', '30s'],
    ]) {
      const lock = await service.acquire(name)
      const { ended } = start(['run', '--url', server, ...wait, name, '--', 'sh', '-c', 'sleep 1; echo ran'])
      await until('it waits', async () => (await service.inspect(name))?.waiting === 1)
      await lock.release()
      assert.deepEqual(await ended, { code: 0, stdout: 'ran\n', stderr: '' })
    }
    // The first process has ended when the second one begins.
    for (const option of ['--once-per', '--min-hold']) {
      const run = () => start(['run', '--url', server, option, '1h', '--wait', '0', name, '--', 'echo', 'ran']).ended
      assert.deepEqual([(await run()).code, (await run()).code], [0, 75], option)
      assert.equal(await service.forceRelease(name), true)
    }
    await service.close()
  })
}
