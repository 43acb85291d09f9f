-- Lets go of what the owner holds of the names, and tells whoever waits.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their metadata companions
--         2n+1 .. 3n     their fence companions, only when the names are to stay busy
-- ARGV    1  the owner's token
--         2  how long the names stay busy, in ms; without it they are free at once
--         3  how long a fence companion lasts at least, in ms; with 2 only
-- Answer  1 when the owner held every name, else 0
--
-- The publication comes first: where the ACL forbids it, the script fails before it has changed anything.

local owner, keep = ARGV[1], ARGV[2]
local n = #KEYS / (keep and 3 or 2)

local held = 0
for i = 1, n do
  local key = KEYS[i]
  if redis.call('GET', key) == owner then
    held = held + 1
    redis.call('PUBLISH', 'holdfast:free:' .. key, '')
    if keep then
      -- Busy for everybody, this owner included: no claim has such a token.
      redis.call('SET', key, owner .. '-kept', 'PX', keep)
      redis.call('PEXPIRE', KEYS[n + i], keep)
      local fence = KEYS[n + n + i]
      if redis.call('PTTL', fence) < tonumber(ARGV[3]) then
        redis.call('PEXPIRE', fence, ARGV[3])
      end
    else
      redis.call('DEL', key, KEYS[n + i])
    end
  end
end
return held == n and 1 or 0
