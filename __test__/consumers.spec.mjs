// Where others load holdfast: bundlers, and the test runners that give each test file globals of its own. Their packages are in
// `consumers/`, which has a lock file of its own.
import { join } from 'node:path'
import { before, test } from 'node:test'
import { installDependencies } from '../scripts/setup.mjs'
import { consumers } from './consumers/cases.mjs'
import { addonOf, install } from './consumers/installed.mjs'
import { CONSUMERS, runCase } from './consumers/tools.mjs'

const skip = addonOf() ? false : 'there is no addon of this machine'

before(() => {
  if (skip) return
  installDependencies('__test__/consumers', { isLenient: true })
  install(join(CONSUMERS, 'node_modules'))
})

// A package that is not installed is a failure here.
for (const each of consumers) {
  test(`holdfast works in ${each.name}`, { skip }, async () => {
    await runCase(each)
  })
}
