-- Makes a tenant part of an epoch that did not know it: with empty counters, whatever an earlier epoch left, as its
-- holds there may be on counters of the platform that were rebuilt without them. (ARGV: now_us, epoch)

if redis.call('HGET', keys.counters, EPOCH) ~= ARGV[2] then
  local attempt = redis.call('HGET', keys.counters, ATTEMPT)
  drop()
  redis.call('HSET', keys.counters, EPOCH, ARGV[2], ATTEMPT, attempt or '0')
end
return {'entered'}
