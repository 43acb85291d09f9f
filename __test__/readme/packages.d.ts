// The parts of packages that the documents use in blocks that are compiled and not run.
declare module 'pg' {
  export class Pool {
    query(text: string, values?: unknown[]): Promise<{ rowCount: number | null }>
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

declare module 'typeorm' {
  export class DataSource {
    constructor(options: { type: 'postgres'; url: string })
    initialize(): Promise<this>
    query(text: string, values?: unknown[]): Promise<any>
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
