// `npm run soak`: installs and builds what is missing, and runs the soak (`__test__/soak/run.mjs` has its settings).
import { ensureBuilt } from './demo/build.mjs'
import { installDependencies, serversDir } from './setup.mjs'

process.env.HOLDFAST_SERVERS_DIR ||= serversDir()
installDependencies()
if (!process.argv.includes('--no-build')) ensureBuilt((text) => console.error(`soak: ${text}`))
await import(new URL('../__test__/soak/run.mjs', import.meta.url).href)
