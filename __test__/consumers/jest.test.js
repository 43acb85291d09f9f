const realm = require('./realm.cjs')

test('what holdfast returns and throws is of the realm of a Jest test', async () => {
  expect(await realm(require('holdfast'), 'jest')).toEqual([])
})
