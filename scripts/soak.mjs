// `npm run soak`: installs and builds what is missing, and runs the soak (`__test__/soak/run.mjs` has its settings).
import { installDependencies } from './setup.mjs'
import { ensureBuilt } from './demo/build.mjs'
import { serversDir } from './test.mjs'

process.env.HOLDFAST_SERVERS_DIR ||= serversDir()
installDependencies()
if (!process.argv.includes('--no-build')) ensureBuilt((text) => console.error(`soak: ${text}`))
await import('../__test__/soak/run.mjs')
