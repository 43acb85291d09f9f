// The work without any lock: the upper bound of the service.
export const kind = 'code'
export const packages = []
export const does = 'no owner check, no fencing token, no renewal: no lock at all'
export const settings = { '': 'the work alone' }

export const connect = async () => ({ hasNoLock: true, using: (_name, work) => work(), close: async () => {} })
