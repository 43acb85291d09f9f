'use strict'

module.exports.createTestLocks = require('./dist/index.js').createTestLocks
