// The parts of packages without types that the benchmark uses, and the documents in blocks that are compiled and not run.
declare module 'pg' {
  interface Result {
    rowCount: number | null
    rows: any[]
  }
  interface Statement {
    name: string
    text: string
    values: unknown[]
  }
  export class Client {
    constructor(options?: { connectionString?: string })
    connect(): Promise<void>
    query(text: string | Statement, values?: unknown[]): Promise<Result>
    on(event: 'error', listener: (error: Error) => void): this
    end(): Promise<void>
    release(): void
  }
  export class Pool {
    constructor(options?: { connectionString?: string; max?: number })
    connect(): Promise<Client>
    query(text: string, values?: unknown[]): Promise<Result>
    end(): Promise<void>
  }
}

declare module '@prisma/client' {
  export class PrismaClient {
    readonly account: {
      updateMany(query: {
        where: { id: number; fence: { lte: bigint } }
        data: { balance: number; fence: bigint }
      }): Promise<{ count: number }>
    }
  }
}

declare module '@aws-sdk/client-s3' {
  interface ObjectName {
    Bucket: string
    Key: string
  }
  export class GetObjectCommand {
    constructor(input: ObjectName)
    readonly output: { Metadata?: Record<string, string>; ETag?: string }
  }
  export class PutObjectCommand {
    constructor(
      input: ObjectName & {
        Body: string
        Metadata?: Record<string, string>
        IfMatch?: string | undefined
        IfNoneMatch?: string
      },
    )
    readonly output: { ETag?: string }
  }
  export class S3Client {
    constructor(config: object)
    send<Output>(command: { readonly output: Output }): Promise<Output>
  }
}

declare module 'bullmq' {
  export class DelayedError extends Error {}
  export class Worker {
    constructor(name: string, processor: (job: any, token: string) => Promise<unknown>)
    close(): Promise<void>
  }
}
