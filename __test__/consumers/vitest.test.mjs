import * as holdfast from 'holdfast'
import { expect, test } from 'vitest'
import realm from './realm.cjs'

test('what holdfast returns and throws is of the realm of a Vitest test', async () => {
  expect(await realm(holdfast, 'vitest')).toEqual([])
})
