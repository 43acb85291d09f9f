'use strict'

module.exports.instrument = require('./dist/otel.js').instrument
