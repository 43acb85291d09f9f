// The boundary between JavaScript and native code. The store does not matter: memory.
import { abort } from './boundary/abort.mjs'
import { callbacks } from './boundary/callbacks.mjs'
import { errors } from './boundary/errors.mjs'
import { events } from './boundary/events.mjs'
import { exotic } from './boundary/exotic.mjs'
import { modules } from './boundary/modules.mjs'
import { suite } from './stores.mjs'

for (const part of [errors, abort, callbacks, events, exotic, modules]) suite('memory', `boundary: ${part.name}`, part)
