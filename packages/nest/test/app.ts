// The application of `__test__/nest.spec.mjs`: one instance of a service that runs several times.
import { setTimeout as sleep } from 'node:timers/promises'
import { Controller, Get, Global, Injectable, Module, Param, Post, Scope, SetMetadata } from '@nestjs/common'
import type { INestApplication, OnApplicationShutdown } from '@nestjs/common'
import { NestFactory } from '@nestjs/core'
import { LockService } from 'holdfast'
import type { Duration } from 'holdfast'
import { currentLock, HoldfastHealthIndicator, HoldfastModule, InjectLocks, Locked, OncePer } from '../src/index.js'
import type { HoldfastModuleOptions } from '../src/index.js'

/** What the instances of this process did. */
export const did = { running: 0, mostRunning: 0, tokens: [] as bigint[], reports: 0, failures: 0, charged: 0 }

@Injectable()
export class Payments {
  readonly locks: LockService

  constructor(@InjectLocks() locks: LockService) {
    this.locks = locks
  }

  @Locked((order: string) => `order:${order}`, { waitMs: '20s' })
  async pay(order: string): Promise<string> {
    did.running += 1
    did.mostRunning = Math.max(did.mostRunning, did.running)
    did.tokens.push(currentLock().fencingToken)
    await sleep(5)
    did.running -= 1
    return `${order} is paid`
  }

  @Locked('charge', { ifBusy: 'skip' })
  async charge(ms: number): Promise<string> {
    await sleep(ms)
    did.charged += 1
    return 'charged'
  }

  // @ts-expect-error An Observable runs after the release.
  @Locked('observable')
  observable(): { subscribe(): void } {
    return { subscribe: () => {} }
  }

  // @ts-expect-error So does a generator.
  @Locked('generator')
  async *generator(): AsyncGenerator<number> {
    yield 1
  }

  @Locked(['a', 'b'])
  async holdsTwo(): Promise<(string | undefined)[]> {
    return [...currentLock().names]
  }

  @Locked((pool: string) => pool, { limit: 3, permits: 1, waitMs: '20s' })
  async ask(_pool: string): Promise<number> {
    did.running += 1
    did.mostRunning = Math.max(did.mostRunning, did.running)
    await sleep(20)
    did.running -= 1
    return currentLock().permits
  }

  @Locked((pool: string) => pool, { limit: 3, permits: 3, ifBusy: 'skip' })
  async askAlone(_pool: string): Promise<number> {
    return currentLock().permits
  }

  @Locked('catalog', { mode: 'read', ifBusy: 'skip' })
  async report(during: () => Promise<unknown>): Promise<unknown> {
    return during()
  }

  @Locked('catalog', { mode: 'write', ifBusy: 'skip' })
  async importAll(during: () => Promise<unknown>): Promise<unknown> {
    return during()
  }

  @Locked((names: string[]) => names, { limit: 3 })
  async askWith(_names: string[]): Promise<void> {}

  @SetMetadata('above', 1)
  @Locked('described')
  @SetMetadata('below', 2)
  async described(): Promise<void> {}
}

@Injectable()
export class Reports {
  @OncePer('report', { periodMs: '1h' })
  async send(): Promise<string> {
    did.reports += 1
    return 'sent'
  }

  @OncePer((day: string) => `flaky:${day}`, { periodMs: '1h' })
  async sendFlaky(_day: string): Promise<string> {
    did.failures += 1
    if (did.failures === 1) throw new Error('the first instance fails')
    return 'sent'
  }
}

@Injectable({ scope: Scope.REQUEST })
class PerRequest {
  @Locked('per-request')
  async run(): Promise<boolean> {
    return currentLock().isHeld
  }
}

@Controller()
class Orders {
  constructor(
    private readonly payments: Payments,
    private readonly perRequest: PerRequest,
    private readonly health: HoldfastHealthIndicator,
  ) {}

  @Post('orders/:id')
  pay(@Param('id') id: string): Promise<string> {
    return this.payments.pay(id)
  }

  // A decorated method of a controller keeps the decorators of its parameters.
  @Post('locked/:id')
  @Locked((id: string) => `direct:${id}`)
  async direct(@Param('id') id: string): Promise<string> {
    return `${id} under ${currentLock().name}`
  }

  @Get('per-request')
  async scoped(): Promise<string> {
    return String(await this.perRequest.run())
  }

  @Get('health')
  isHealthy(): Promise<object> {
    return this.health.isHealthy()
  }
}

@Injectable()
class Settings {
  readonly url = process.env['NEST_TEST_URL']!
}

@Module({ providers: [Settings], exports: [Settings] })
class SettingsModule {}

const parts = { providers: [Payments, Reports, PerRequest], controllers: [Orders] }

/** Starts an instance. `isAsync`: its URL comes from another provider. */
export async function start(
  url: string | undefined,
  isAsync = false,
  drainMs: Duration = '20s',
): Promise<{ app: INestApplication; address: string }> {
  process.env['NEST_TEST_URL'] = url ?? ''
  const holdfast = isAsync
    ? HoldfastModule.forRootAsync({
        imports: [SettingsModule],
        inject: [Settings],
        useFactory: (settings: Settings) => ({ url: settings.url }),
      })
    : HoldfastModule.forRoot({ url: url!, drainMs })
  @Module({ imports: [holdfast], ...parts })
  class App {}
  const app = await NestFactory.create(App, { logger: ['error'], abortOnError: false })
  await app.listen(0, '127.0.0.1')
  return { app, address: await app.getUrl() }
}

/** Starts an application whose factory returns these options. */
export async function startWith(options: HoldfastModuleOptions): Promise<void> {
  @Module({ imports: [HoldfastModule.forRootAsync({ useFactory: () => options })] })
  class App {}
  const app = await NestFactory.createApplicationContext(App, { logger: false, abortOnError: false })
  await app.close().catch(() => {})
}

/** Ends an application while a job runs under a lock. Resolves to what ended, in this order. */
export async function endWithDatabase(): Promise<string[]> {
  const ended: string[] = []
  @Injectable()
  class Database implements OnApplicationShutdown {
    onApplicationShutdown() {
      ended.push('database')
    }
  }
  @Global()
  @Module({ providers: [Database] })
  class DatabaseModule {}
  @Module({ imports: [DatabaseModule, HoldfastModule.forRoot({ url: 'memory:' })] })
  class App {}
  const app = await NestFactory.createApplicationContext(App, { logger: ['error'], abortOnError: false })
  let isRunning = false
  const job = app.get(LockService).using('job', async () => {
    isRunning = true
    await sleep(200)
    ended.push('job')
  })
  while (!isRunning) await sleep(5)
  await Promise.all([job, app.close()])
  return ended
}
