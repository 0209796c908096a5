-- Makes a tenant part of the epoch that a rebuild ends with. (ARGV: now_us, number of the attempt, epoch)

if not may_rebuild(tonumber(ARGV[2])) then
  return {'lost'}
end
redis.call('HSET', keys.counters, EPOCH, ARGV[3])
return {'stamped'}
