// An instance with a schedule: runs a recipe of docs/recipes/cron.md with a clock that differs from the others'.
import { LockService } from '../../index.js'

const { file, url, skewMs, fails } = JSON.parse(process.argv[2])
const RealDate = Date

globalThis.Date = /** @type {DateConstructor} */ (
  /** @type {unknown} */ (
    class extends RealDate {
      /** @param {any[]} given */
      constructor(...given) {
        if (given.length === 0) super(RealDate.now() + skewMs)
        else super(.../** @type {[number]} */ (given))
      }

      static now() {
        return RealDate.now() + skewMs
      }
    }
  )
)

/** @param {string} type */
const report = (type) => process.send?.({ type, at: RealDate.now() })

const service = await LockService.connect(url)
let runs = 0
Object.assign(globalThis, {
  locks: {
    /** @type {LockService['oncePer']} */
    oncePer(...given) {
      report('call')
      return service.oncePer(...given)
    },
  },
  async sendReport() {
    if (fails && runs++ % 2 === 0) {
      report('failure')
      throw new Error('from the job')
    }
    report('success')
  },
})
process.on('disconnect', () => process.exit())
await import(file)
report('ready')
