// nestjs-redlock-universal in a Nest application, as its README shows it for one Redis.
import 'reflect-metadata'
import { Injectable, Module } from '@nestjs/common'
import { NestFactory } from '@nestjs/core'
import { Redis } from 'ioredis'
import { IoredisAdapter, Redlock, RedlockModule, RedlockService } from 'nestjs-redlock-universal'

/** Starts an application. Resolves to its `RedlockService`, and to `job` with `@Redlock(options)`. */
export async function startNest(url, options, job) {
  class Jobs {
    async run(argument) {
      await job(argument)
    }
  }
  const method = /** @type {PropertyDescriptor} */ (Object.getOwnPropertyDescriptor(Jobs.prototype, 'run'))
  const locked = /** @type {any} */ (Redlock(options))(Jobs.prototype, 'run', method)
  Object.defineProperty(Jobs.prototype, 'run', locked ?? method)
  Injectable()(Jobs)
  class App {}
  const client = new Redis(url)
  // The client reports each failed attempt to connect again.
  client.on('error', () => {})
  const imports = [RedlockModule.forRoot({ nodes: [new IoredisAdapter(client)], defaultTtl: options.ttl })]
  Module({ imports, providers: [Jobs] })(App)
  const app = await NestFactory.createApplicationContext(App, { logger: false })
  const jobs = app.get(Jobs)
  return { redlock: app.get(RedlockService), run: (argument) => jobs.run(argument) }
}
